"""Variables that an earlier training left in a process have the effect that accelerate gives them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import Trainer
from trl import SFTConfig

from autotune.core.configuration import Configuration
from autotune.core.documents.verdict import Outcome
from autotune.core.files.nested import lookup
from autotune.errors import UnreadError
from autotune.userconfig.engine import check_documents, engine_args, with_variables
from autotune.userconfig.launch import Launching
from autotune.userconfig.objects import as_started, configuration_of
from tests.app.check.conftest import Checked
from tests.app.configured import sft
from tests.step.plans import needs_deepspeed

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
    values = as_started(configuration_of(config), config)[0].values
    assert next((name for name in ("bf16", "fp16") if values[name]), "no") == precision
    assert Trainer(torch.nn.Linear(1, 1), config).accelerator.mixed_precision == precision


@needs_deepspeed
def test_an_object_of_a_process_in_which_a_training_used_deepspeed_leaves_its_need_open() -> None:
    from accelerate.utils import DeepSpeedPlugin

    assert sft().deepspeed_plugin is None
    # What `Accelerator` sets with a plugin.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    config = sft()
    assert isinstance(config.deepspeed_plugin, DeepSpeedPlugin)
    with pytest.raises(UnreadError, match="ACCELERATE_USE_DEEPSPEED chooses an engine"):
        as_started(configuration_of(config), config)


def test_an_object_is_compiled_by_the_variable_that_is_left(
    model: Path, rows: Callable[[str], Path], checked: Checked
) -> None:
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "inductor"
    config = sft()
    assert Trainer(torch.nn.Linear(1, 1), config).accelerator.state.dynamo_plugin.backend.value == "INDUCTOR"
    verdict = checked(config=config, model=str(model), dataset=str(rows("sft")), gpu="H100-80GB")
    assert verdict.outcome is Outcome.UNKNOWN
    assert "dynamo_backend: inductor compiles the model" in verdict.reason


def test_an_object_that_a_variable_puts_on_the_cpu_needs_no_gpu(
    model: Path, rows: Callable[[str], Path], checked: Checked
) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    config = SFTConfig(bf16=False, report_to="none")
    assert Accelerator().device.type == "cpu"
    verdict = checked(config=config, model=str(model), dataset=str(rows("sft")), gpu="H100-80GB")
    assert verdict.outcome is Outcome.CANNOT_RUN
    assert "use_cpu puts the model on the CPU" in verdict.findings[0].message


@needs_deepspeed
@pytest.mark.parametrize(
    ("name", "value", "path", "default", "used"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "gradient_accumulation_steps", "auto", 4),
        ("ACCELERATE_GRADIENT_CLIPPING", "0.5", "gradient_clipping", "auto", 0.5),
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3", "zero_optimization.stage", 2, 3),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu", "zero_optimization.offload_param.device", "none", "cpu"),
    ],
)
def test_a_variable_that_sets_deepspeed_s_document_leaves_the_answer_open(
    name: str, value: str, path: str, default: object, used: object
) -> None:
    from accelerate.utils import DeepSpeedPlugin

    def in_plugin() -> object:
        (found,) = lookup(DeepSpeedPlugin().deepspeed_config, path.split("."))
        return found

    assert in_plugin() == default
    os.environ[name] = value
    assert in_plugin() == used
    started = Launching(2, document={"distributed_type": "DEEPSPEED"}, variables={name: value})
    with pytest.raises(UnreadError, match=f"{name} sets DeepSpeed's document"):
        check_documents(started, NOTHING)
    # The trainer's own document has precedence, as has another engine.
    check_documents(started, replace(NOTHING, values={"deepspeed": {"zero_optimization": {"stage": 2}}}))
    check_documents(replace(started, document={"distributed_type": "MULTI_GPU"}), NOTHING)


def test_layers_are_wrapped_by_the_size_that_variables_name() -> None:
    left = {**SECOND, "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}
    for variables in (left, {**left, "FSDP_MIN_NUM_PARAMS": "5000"}):
        with mock.patch.dict(os.environ, variables):
            real = FullyShardedDataParallelPlugin()
        started = with_variables(Launching(2, variables=variables), NOTHING)
        found: Any = engine_args(started.document, NOTHING, 2, variables=variables)
        assert found["fsdp_config"]["auto_wrap_policy"] == "SIZE_BASED_WRAP"
        assert found["fsdp_config"].get("min_num_params", 0) == real.min_num_params
