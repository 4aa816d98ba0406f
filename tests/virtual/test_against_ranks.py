"""With several processes, the trace of each rank equals the allocations of PyTorch's CPU allocator there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.plan import Launch, TrainingPlan
from autotune.probing import JobServer
from autotune.step.distributed.engines import Engine, engine_of, worst_rank
from tests.step.plans import fsdp2, needs_deepspeed, zero
from tests.virtual.real_ranks import STEPS, WORST, Case, Measured, on_ranks, traced_ranks

RANKS = 2
LENGTH = 96
# Wide enough that no scalar or padding is a share of the peak.
MODEL = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
CHECKPOINTED = {"gradient_checkpointing": True}
ACCUMULATED = {"gradient_accumulation_steps": 2}
SYNCED = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
nightly = pytest.mark.nightly


def case_of(args: Mapping[str, object]) -> Case:
    """Return a case, of which one step is traced where steps are alike."""
    shape = {"per_device_train_batch_size": 2, "max_length": LENGTH, "gradient_checkpointing": False, "bf16": False}
    plan = TrainingPlan("sft", {**shape, **args}, launch=Launch(RANKS))
    return Case(plan, "llama", MODEL, ((LENGTH,), (LENGTH,)), once=engine_of(plan) is not Engine.DEEPSPEED)


def compared(
    args: Mapping[str, object], server: JobServer, folder: Path, ranks: Sequence[int] = range(RANKS)
) -> list[dict[str, tuple[Measured, Measured]]]:
    """Return, for each of the ranks and each step, what was traced and what was measured."""
    case = case_of(args)
    real, traced = on_ranks(case, folder), traced_ranks(server, case, ranks)
    both = zip(traced, (real[rank] for rank in ranks), strict=True)
    return [{name: (of_trace[name], of_run[name]) for name in STEPS} for of_trace, of_run in both]


BY_PYTORCH = {
    "fsdp2": fsdp2(),
    "ddp": {},
    "ddp-checkpointed-accumulated": {**CHECKPOINTED, **ACCUMULATED},
    "fsdp2-not-resharded": fsdp2(reshard_after_forward=False),
    "fsdp2-checkpointed": {**fsdp2(), **CHECKPOINTED},
    "fsdp2-accumulated": {**fsdp2(), **ACCUMULATED},
    "fsdp2-synced": {**fsdp2(), **ACCUMULATED, **SYNCED},
}


@nightly
@pytest.mark.slow
@pytest.mark.parametrize("args", BY_PYTORCH.values(), ids=BY_PYTORCH)
def test_the_peak_of_each_rank_is_that_of_the_cpu(args: dict[str, Any], job_server: JobServer, tmp_path: Path) -> None:
    for rank in compared(args, job_server, tmp_path):
        for traced, real in rank.values():
            assert traced.peak_bytes == pytest.approx(real.peak_bytes, rel=0.001)
            assert traced.end_bytes == pytest.approx(real.end_bytes, rel=0.001)


def offloaded(stage: int) -> dict[str, Any]:
    """Return the arguments of ZeRO that moves gradients and the optimizer's state, on a CPU within its own memory."""
    args = zero(stage, offload_optimizer={"device": "cpu"})
    # DeepSpeed's own optimizer for a CPU is compiled for minutes.
    return {"deepspeed": {**args["deepspeed"], "zero_force_ds_cpu_optimizer": False}}


BY_RANK = {
    "zero1": zero(1),
    "zero1-accumulated": {**zero(1), **ACCUMULATED},
    "zero1-offloaded-accumulated": {**offloaded(1), **ACCUMULATED},
    "zero2": zero(2),
    "zero2-accumulated": {**zero(2), **ACCUMULATED},
    "zero2-checkpointed": {**zero(2), **CHECKPOINTED},
    "zero2-offloaded": offloaded(2),
    "zero2-offloaded-accumulated": {**offloaded(2), **ACCUMULATED},
}


@nightly
@needs_deepspeed
@pytest.mark.parametrize("args", BY_RANK.values(), ids=BY_RANK)
def test_each_rank_of_zero_needs_what_its_trace_says_and_none_more_than_the_one_that_is_traced(
    args: dict[str, Any], job_server: JobServer, tmp_path: Path
) -> None:
    ranks = compared(args, job_server, tmp_path)
    worst = worst_rank(TrainingPlan("sft", args, launch=Launch(RANKS)))
    for name in STEPS:
        for traced, real in (rank[name] for rank in ranks):
            assert traced.peak_bytes == pytest.approx(real.peak_bytes, rel=0.001)
            assert traced.end_bytes == pytest.approx(real.end_bytes, rel=0.001)
        assert ranks[worst][name][1].peak_bytes >= 0.98 * max(rank[name][1].peak_bytes for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        {**fsdp2(), **ACCUMULATED},
        pytest.param(fsdp2(reshard_after_forward=False), marks=nightly),
        pytest.param({**ACCUMULATED, **CHECKPOINTED}, marks=nightly),
    ],
    ids=["fsdp2", "fsdp2-not-resharded", "ddp-checkpointed"],
)
def test_a_step_that_is_added_holds_what_it_holds_where_it_is_traced(
    args: dict[str, Any], job_server: JobServer
) -> None:
    case = case_of(args)
    once, twice = (traced_ranks(job_server, replace(case, once=once), (RANKS - 1,))[0] for once in (True, False))
    for added, traced in ((once[name], twice[name]) for name in STEPS):
        # Single numbers, such as the loss, are there until the next one replaces them.
        assert added.peak_bytes == pytest.approx(traced.peak_bytes, abs=64)
        assert added.end_bytes == pytest.approx(traced.end_bytes, abs=64)


@nightly
@needs_deepspeed
def test_the_rank_of_zero_2_with_the_largest_share_of_gradients_needs_the_most(tmp_path: Path) -> None:
    args = {"per_device_train_batch_size": 1, "max_length": LENGTH, "bf16": False, **zero(2), **ACCUMULATED}
    # Three of four ranks hold the words whole, and the third of them the first tensors of a layer too.
    plan = TrainingPlan("sft", args, launch=Launch(4))
    case = Case(plan, "llama", {**MODEL, "num_hidden_layers": 1, "vocab_size": 8192}, ((LENGTH,),))
    peaks = [max(step.peak_bytes for step in rank.values()) for rank in on_ranks(case, tmp_path)]

    worst = int((tmp_path / WORST).read_text(encoding="utf-8"))
    assert peaks[worst] == max(peaks)
    assert peaks[worst] > 1.02 * peaks[-1]


@nightly
@needs_deepspeed
@pytest.mark.parametrize(
    "args",
    [zero(3), {**zero(3), **ACCUMULATED}, {**zero(3), **CHECKPOINTED, **ACCUMULATED}],
    ids=["zero3", "zero3-accumulated", "zero3-checkpointed-accumulated"],
)
def test_zero_3_holds_what_the_cpu_hands_out(args: dict[str, Any], job_server: JobServer, tmp_path: Path) -> None:
    # Ranks are alike here. DeepSpeed compares what they do with what the first one says, which only that one has.
    (first,) = compared(args, job_server, tmp_path, ranks=(0,))
    for traced, real in first.values():
        assert traced.peak_bytes == pytest.approx(real.peak_bytes, rel=0.001)
        assert traced.end_bytes == pytest.approx(real.end_bytes, rel=0.001)
