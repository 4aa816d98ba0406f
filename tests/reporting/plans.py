"""Plans made by hand: ``autotune plan`` for a GPU with 24 GiB."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autotune.core.candidate import Candidate
from autotune.core.documents.estimate import Change, Estimate, MemoryEstimate, Origin, Plan
from autotune.core.documents.unsearched import ExcludedChoice, Unlockable
from autotune.core.gpu import Gpu
from autotune.core.rows.epoch import Epoch
from autotune.units import GIB, MIB
from tests.reporting.examples import BASELINE

BUDGET_BYTES = 24 * GIB
LONGEST = BASELINE.but(gradient_checkpointing="selective", packing="bfd", per_device_train_batch_size=4, lora="r16")


def an_estimate(candidate: Candidate, needs_bytes: int, rate: float | None, **changes: Any) -> Estimate:
    """An estimate whose memory is half parameters, a quarter activations, and the rest of the other kinds."""
    context_bytes, fragmentation = 512 * MIB, 256 * MIB
    parameter, activation = needs_bytes // 2, needs_bytes // 4
    gradient = needs_bytes - parameter - activation - context_bytes - fragmentation
    memory = MemoryEstimate(
        peak_bytes=needs_bytes - context_bytes - fragmentation,
        reserved_bytes=needs_bytes - context_bytes,
        context_bytes=context_bytes,
        breakdown={
            "parameter": parameter, "gradient": gradient, "activation": activation, "fragmentation": fragmentation,
            "context": context_bytes,
        },
        host_bytes=3 * MIB,
        machine_bytes=3 * MIB,
        step_seconds=None if rate is None else 8192 / rate,
        error=0.1,
    )  # fmt: skip
    estimate = Estimate(candidate, Origin.TRACED, memory, rate, BUDGET_BYTES - needs_bytes)
    return replace(estimate, **changes)


FASTEST = an_estimate(LONGEST, 20 * GIB, 9000.0)
SECOND = an_estimate(BASELINE.but(lora="r16", packing="bfd"), 21 * GIB, 8000.0)
DEFAULT = an_estimate(BASELINE, 31 * GIB, 7000.0)
UNKNOWN = Estimate(
    BASELINE.but(attention="strange_attention"), Origin.UNKNOWN, reason="strange_attention gives no shape"
)
AN_EPOCH = Epoch(
    token_coverage=0.991,
    max_length=1024,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    documents_per_step=8.0,
    tokens_per_step=7_700.5,
    steps_per_epoch=88,
    seconds_per_epoch=75.0,
)


def a_plan(**changes: Any) -> Plan:
    """A plan in which two fit, TRL's default is too large, and one is unknown."""
    plan = Plan(
        model="Qwen/Qwen2.5-7B",
        dataset="rows of 1024 tokens",
        gpu=Gpu("RTX4090", BUDGET_BYTES, "usable", "https://example.org", 512 * MIB),
        budget_bytes=BUDGET_BYTES,
        global_batch_size=8,
        estimates=(FASTEST, SECOND, DEFAULT, UNKNOWN),
        baseline=DEFAULT,
        changes=(Change(BASELINE, SECOND),),
        left_out=(ExcludedChoice("hub_kernels", "on", "the package kernels is not installed"),),
        unlockable=(Unlockable("quantization", ("8bit", "4bit-nf4"), "rounds the frozen weights"),),
        notes=("Nothing was measured.",),
        trace_count=14,
        new_trace_count=5,
        wall_seconds=12.0,
        settings={"fix": {}},
    )
    return replace(plan, **changes)
