"""Variables that an earlier training left in a process have the effect that accelerate gives them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import Trainer

from autotune.core.configuration import Configuration
from autotune.errors import UnreadError
from autotune.userconfig.engine import check_documents, engine_args, with_variables
from autotune.userconfig.launch import Launching
from autotune.userconfig.objects import as_built, configuration_of
from tests.app.configured import sft

LEFT = {"ACCELERATE_USE_FSDP": "true"}
SECOND = {**LEFT, "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
NOTHING = Configuration("SFTConfig", {}, {})


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Restore accelerate's state of the process and the variables."""
    kept = dict(PartialState._shared_state)
    with mock.patch.dict(os.environ):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        yield
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    PartialState._shared_state.update(kept)


def test_a_training_with_fsdp_leaves_its_variable() -> None:
    Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    assert "FSDP_VERSION" not in os.environ


@pytest.mark.parametrize("kind", [DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU])
@pytest.mark.parametrize("left", [LEFT, SECOND], ids=["of FSDP", "of FSDP2"])
def test_the_variable_of_fsdp_has_the_effect_of_accelerate(kind: DistributedType, left: Mapping[str, str]) -> None:
    os.environ.update(left)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = kind
    real = Accelerator().state
    sharded = real.distributed_type is DistributedType.FSDP
    assert sharded is (kind is DistributedType.MULTI_GPU)
    config = replace(NOTHING, values={"use_cpu": kind is DistributedType.MULTI_CPU})
    started = Launching(1 if kind is DistributedType.NO else 2, variables=left)
    version = real.fsdp_plugin.fsdp_version if sharded else None
    with pytest.raises(UnreadError, match="Unset ACCELERATE_USE_FSDP") if version == 1 else nullcontext():
        started = with_variables(started, config)
        check_documents(started, config)
        found: Any = engine_args(started.document, config, started.processes, variables=started.variables)
        assert bool(found.get("fsdp")) is sharded
        if sharded:
            assert found["fsdp_config"]["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
            assert found["fsdp_config"]["state_dict_type"] == real.fsdp_plugin.state_dict_type.name


def test_an_engine_of_a_file_comes_before_the_variable_of_another() -> None:
    deepspeed = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}}
    own = replace(NOTHING, values={"fsdp": True, "fsdp_config": {"version": 2}})
    for document, config, engine in ((deepspeed, NOTHING, "deepspeed"), ({}, own, "fsdp")):
        started = with_variables(Launching(2, document=document, variables=LEFT), config)
        check_documents(started, config)
        assert engine in engine_args(started.document, config, 2, variables=started.variables)
    # Of a process with a rank, FSDP is not traced.
    ranked = with_variables(Launching(1, variables=SECOND, is_ranked=True), NOTHING)
    with pytest.raises(UnreadError, match="FSDP of a single process"):
        engine_args(ranked.document, NOTHING, 1)
    # accelerate's launcher passes no section of another engine on.
    unused = {"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_offload_params": True}}
    assert with_variables(Launching(2, document=unused, variables=SECOND), NOTHING).document == {
        "distributed_type": "FSDP"
    }


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_configuration_object_trains_in_the_precision_of_accelerate_s_variable(precision: str) -> None:
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision
    config = sft(bf16=False, fp16=False)
    values = as_built(configuration_of(config), config).values
    assert next((name for name in ("bf16", "fp16") if values[name]), "no") == precision
    assert Trainer(torch.nn.Linear(1, 1), config).accelerator.mixed_precision == precision


def test_a_precision_that_is_not_traced_leaves_an_object_s_need_open() -> None:
    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
    config = sft()
    with pytest.raises(UnreadError, match=r"mixed_precision: fp8 is not traced\. Write bf16 or fp16"):
        as_built(configuration_of(config), config)
