"""Weighted sums of times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter, mul

from autotune.core.step_time import StepTime

_NAMES = tuple(field.name for field in fields(StepTime))
_figures = attrgetter(*_NAMES)


def mixed_times(terms: Sequence[tuple[StepTime, float]]) -> StepTime:
    """Return the weighted sum of times; negative figures become 0."""
    weights = [weight for _, weight in terms]
    columns = zip(*[_figures(time) for time, _ in terms], strict=True)
    sums = {name: max(0.0, sum(map(mul, weights, column))) for name, column in zip(_NAMES, columns, strict=True)}
    return StepTime(**{**sums, "flops": round(sums["flops"])})
