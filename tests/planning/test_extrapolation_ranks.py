"""Extrapolations of sharded plans equal full-size traces: engines gather the weights of the next layers ahead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.jobs.traced import TraceReply, TraceRequest
from autotune.core.plan import Launch, TrainingPlan
from autotune.core.program import CONSTRUCTION
from autotune.core.workload import ModelSource
from autotune.inspection.gpus import find_gpu
from autotune.planning.extrapolation.fit import Fit
from autotune.planning.extrapolation.forecast import Forecast
from autotune.planning.single import depths_of, edges_of
from autotune.probing import trace
from autotune.probing.server import Worker
from autotune.techniques.sharding import zero_stage
from autotune.techniques.traits import plan_impact
from autotune.units import MIB
from tests.settings import setting
from tests.small import write_small_model
from tests.step.plans import fsdp2, needs_deepspeed, zero

# With prefetching, traces have 4 and 5 layers.
LAYERS, RANKS, TOKENS = 8, 8, 128
# The weights of layers and the embedding larger than what is computed with them, as in large models.
WIDE: dict[str, Any] = {"hidden_size": 256, "vocab_size": 4096}
# The sizes of Llama-3.1-8B.
LARGE: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
CHECKPOINTED = {"gradient_checkpointing": True}
TO_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
pytestmark = [pytest.mark.slow, pytest.mark.nightly]
SHARDED: dict[str, dict[str, Any]] = {
    "fsdp2": fsdp2(),
    "fsdp2-checkpointed": {**fsdp2(), **CHECKPOINTED},
    **{
        f"zero{stage}{name}": {**zero(stage), **more}
        for stage in (1, 3)
        for name, more in (("", {}), ("-checkpointed", CHECKPOINTED))
    },
}


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(CHECKPOINTED, id="ddp"),
        *(
            pytest.param(
                args,
                id=name,
                marks=needs_deepspeed if name.startswith("zero") else (),
            )
            for name, args in SHARDED.items()
        ),
    ],
)
def test_a_full_trace_is_what_small_ones_foretell(
    args: dict[str, Any], worker: Worker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foretold, full = _foretold(args, WIDE, LAYERS, worker, tmp_path)

    reserved = foretold.peak_bytes + foretold.overhead_bytes + foretold.unused_bytes
    deviations = (f"tensors {foretold.peak_bytes / full.device.bytes - 1:+.2%}",
                  f"reserved {reserved / (full.replayed().reserved_bytes or 1) - 1:+.1%}")  # fmt: skip
    with capsys.disabled():
        print(" ", *deviations, end=" ")  # noqa: T201 (the table of deviations)
    assert foretold.peak_bytes == pytest.approx(full.device.bytes, rel=0.005)
    assert foretold.host_bytes == pytest.approx(full.host.bytes, rel=0.01)
    # What ZeRO-1 takes for the first update depends on the tensors that a rank's share ends in.
    error = 0.02 if zero_stage(plan_of(args)) == 1 else 0.005
    for section in full.sections:
        stretches = [stretch for (part, _), stretch in foretold.stretches.items() if part == section.part]
        totals = [sum(stretch.highest[1].values()) for stretch in stretches]
        if max(section.totals, default=0):
            assert max(totals) == pytest.approx(max(section.totals), rel=error), section.part


@needs_deepspeed
@pytest.mark.parametrize(
    "args",
    [
        pytest.param(zero(1), id="zero1"),
        pytest.param({**zero(1), **CHECKPOINTED}, id="zero1-checkpointed"),
        pytest.param({**zero(1, **TO_HOST), **CHECKPOINTED}, id="zero1-offloaded"),
        pytest.param({**zero(2, **TO_HOST), **CHECKPOINTED}, id="zero2-offloaded"),
        pytest.param({**zero(3), **CHECKPOINTED}, id="zero3-adapters"),
    ],
)
def test_the_need_of_a_large_model_is_what_the_layers_that_are_traced_foretell(
    args: dict[str, Any], request: pytest.FixtureRequest, worker: Worker, tmp_path: Path
) -> None:
    """A rank's share of 8 billion weights has tensors of many layers; that of few layers has a part of one.

    With adapters, ZeRO-3 prefetches further ahead.
    """
    adapts = "adapters" in request.node.callspec.id
    foretold, full = _foretold(args, LARGE, LARGE["num_hidden_layers"], worker, tmp_path, adapts=adapts)

    assert foretold.peak_bytes == pytest.approx(full.device.bytes, rel=0.005)
    assert foretold.host_bytes == pytest.approx(full.host.bytes, rel=0.01)


def test_a_constructor_that_joins_weights_needs_no_space_for_all_of_them(worker: Worker, tmp_path: Path) -> None:
    """DDP sends weights in buckets, which those of a few small layers do not fill."""
    shape = {**LARGE, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "vocab_size": 4096}
    foretold, full = _foretold({}, shape, LARGE["num_hidden_layers"], worker, tmp_path, adapts=True)

    joined = [section for section in full.sections if section.part.phase == CONSTRUCTION]
    assert max(joined[0].levels["temporary"]) > 500 * MIB * 0.99
    stretch = foretold.stretches[joined[0].part, False]
    assert sum(stretch.highest[1].values()) == pytest.approx(max(joined[0].totals), rel=0.02)
    assert foretold.peak_bytes == pytest.approx(full.device.bytes, rel=0.02)


def plan_of(args: dict[str, Any]) -> TrainingPlan:
    shape = {"per_device_train_batch_size": 1, "max_length": TOKENS, "bf16": True,
             "gradient_accumulation_steps": 2, "gradient_checkpointing": False}  # fmt: skip
    return TrainingPlan("sft", {**shape, **args}, launch=Launch(RANKS))


def _foretold(
    args: dict[str, Any], shape: dict[str, Any], layers: int, worker: Worker, folder: Path, *, adapts: bool = False
) -> tuple[Forecast, TraceReply]:
    """Return what traces of few layers foretell of a model, and a trace of all of its layers."""
    kinds = ("layer",) * layers
    adapters = {"use_peft": True, "lora_target_modules": ["all-linear"]} if adapts else {}
    plan = replace(plan_of(args), model={"dtype": "bfloat16", **adapters} if adapts else {})
    profile = replace(setting().workload.model, layer_kinds=kinds, quantizable=layers * 218_103_808)
    edges = edges_of(plan, replace(profile, largest_weight=shape["hidden_size"] * shape["vocab_size"]))
    wanted = depths_of(plan, kinds, edges=edges)
    source = ModelSource(
        str(write_small_model(folder / "model", weights=False, **{"num_hidden_layers": layers, **shape}))
    )
    *small, full = _traced(worker, folder, source, plan, [*wanted, layers])
    fit = Fit(dict(zip(wanted, small, strict=True)), layers, edges=edges, impact=plan_impact(plan))
    return fit.forecast(2), full


def _traced(
    worker: Worker, folder: Path, source: ModelSource, plan: TrainingPlan, depths: list[int]
) -> list[TraceReply]:
    requests = [
        TraceRequest(plan, source, "cuda", ((TOKENS,),), layers=depth, gpu=find_gpu("H100-80GB")) for depth in depths
    ]
    return [trace(worker, request, folder / str(number), 250.0) for number, request in enumerate(requests)]
