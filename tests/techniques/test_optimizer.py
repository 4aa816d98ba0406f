"""Adagrad allocates its state early, which engines that replace weights do not expect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from autotune.core.setting import Base
from tests.settings import GPU, WITH_DEEPSPEED, machine_with, setting
from tests.techniques.test_rules import SFT, candidate


@pytest.mark.parametrize(
    ("entries", "legal"), [({}, False), ({"args.save_strategy": "no"}, True), ({"args.save_only_model": True}, True)]
)
def test_adagrad_is_sharded_by_fsdp2_if_no_checkpoint_has_its_state(entries: Mapping[str, object], legal: bool) -> None:
    two = setting(machine=machine_with(GPU, processes=2))
    here = replace(two, base=Base("mine.yaml", {"optimizer": "adagrad", "sharding": "fsdp2"}, entries=entries))
    assert (SFT.illegal(candidate(here, optimizer="adagrad", sharding="fsdp2"), here) is None) is legal
    assert SFT.illegal(candidate(here, optimizer="adagrad"), here) is None


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_deepspeed_updates_one_group_of_weights_by_adagrad(stage: str) -> None:
    two = setting(machine=machine_with(WITH_DEEPSPEED, processes=2), allowed=frozenset({"lora"}))
    here = replace(two, base=Base("mine.yaml", {"optimizer": "adagrad", "sharding": stage}))
    whole = candidate(here, optimizer="adagrad", sharding=stage)
    assert "with a single group of weights" in str(SFT.illegal(whole, here))
    assert SFT.illegal(whole.but(lora="r16"), here) is None
