"""What a vLLM server on GPUs of its own holds there, and on how many it can run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autotune.core.plan import TrainingPlan
from autotune.core.workload import ModelProfile
from autotune.planning.vllm import Engine, Reservation, engine_of, reservation, why_not
from autotune.techniques.vllm_tensor_parallel_size import undivided

UTILIZATION = 0.9
"""The share of its GPUs that the server takes unless it is told otherwise (``trl/scripts/vllm_serve.py``)."""


def generating_gpus(gpus: int) -> Iterator[int]:
    """Yield how many of the GPUs of a machine a server may get: powers of two, one GPU at least being left."""
    number = 1
    while number < gpus:
        yield number
        number *= 2


def server_of(plan: TrainingPlan, model: ModelProfile, gpus: int, tokens: int | None) -> Engine:
    """Return the server of a plan, whose weights and cache so many GPUs share.

    Args:
        tokens: of the longest prompt with its completion.
    """
    engine = engine_of(plan, model)
    assert engine is not None
    return replace(engine, on_server=False, sleeps=False, utilization=UTILIZATION, parallel=gpus, tokens=tokens)


def held_by_server(engine: Engine, model: ModelProfile, total_bytes: int) -> Reservation | str:
    """Return what a server takes of each of its GPUs, or why it does not start there."""
    return (
        undivided(model, engine.parallel)
        or why_not(engine, model, total_bytes)
        or reservation(engine, model, total_bytes)
    )
