"""Weighted sums of times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from autotune.core.step_time import StepTime


def mixed_times(terms: Sequence[tuple[StepTime, float]]) -> StepTime:
    """Return the sum of times, each with its weight."""
    sums = {
        field.name: max(0.0, sum(weight * getattr(time, field.name) for time, weight in terms))
        for field in fields(StepTime)
    }
    return StepTime(**{**sums, "flops": round(sums["flops"])})
