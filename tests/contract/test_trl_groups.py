"""Contract with TRL, accelerate and PyTorch: the catalogue's rules on rows that processes share."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from accelerate import ParallelismConfig
from torch.distributed.tensor.experimental._context_parallel import _attention

from autotune.core.candidate import Choice
from autotune.techniques import find
from autotune.techniques.base import facts
from autotune.trainers import find_trainer
from tests.contract.building import config_class
from tests.emit.test_launch import HERE, LONG
from tests.settings import plan_with

SIZES = (2, 4, 8)


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_rearranged_where_their_length_is_a_multiple_of_twice_the_ranks(size: int) -> None:
    def rearranged(tokens: int) -> bool:
        return _attention._create_default_load_balancer(tokens, size, "cpu") is not None

    # Attention takes rows for rearranged, whether they are or not.
    assert _attention._cp_options.enable_load_balance
    assert [rearranged(tokens) for tokens in (2 * size, 6 * size)] == [True, True]
    if torch.__version__ >= (2, 13):
        assert [rearranged(tokens) for tokens in (3 * size, 2 * size + 1)] == [False, False]
    choices: dict[str, Choice] = {
        "sharding": "fsdp2",
        "context_parallel": size,
        "pad_to_multiple_of": 64,
        "max_length": 9000,
    }
    plan = plan_with(HERE, choices)
    geometry = find_trainer("sft").geometry(plan, LONG.dataset.documents)
    assert rearranged(int(geometry.worst.tokens))


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_trainers_that_generate_refuse_rows_that_are_split(trainer: str, tmp_path: Path) -> None:
    sizes = ParallelismConfig(cp_size=2)
    with pytest.raises(ValueError, match="does not support sequence-dim parallelism"):
        config_class(trainer)(output_dir=str(tmp_path), use_cpu=True, bf16=False, parallelism_config=sizes)
    assert 2 in facts(find("context_parallel", find_trainer(trainer).techniques), trainer).refused


def test_accelerate_needs_a_process_to_shard_among_beside_each_row() -> None:
    with pytest.raises(ValueError, match="cannot be used with pure data parallelism"):
        ParallelismConfig(cp_size=4, dp_replicate_size=2, dp_shard_size=1)
    # Later ones have `sp_size` too.
    assert {"cp_size", "tp_size", "dp_replicate_size", "dp_shard_size"} <= {
        field.name for field in dataclasses.fields(ParallelismConfig)
    }
