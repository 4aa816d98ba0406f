"""Weighted sums of figures, and of times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from operator import attrgetter, mul

import numpy as np
import numpy.typing as npt

from autotune.core.step_time import StepTime

Figures = npt.NDArray[np.float64]
_NAMES = tuple(field.name for field in fields(StepTime))
_figures = attrgetter(*_NAMES)


def mixed_times(terms: Sequence[tuple[StepTime, float]]) -> StepTime:
    """Return the weighted sum of times; negative figures become 0.

    What the device, the links and the host do are sums over operators, which sizes and layers scale. The whole is not:
    where small traces wait for the links and a larger one computes for longer, the weighted sum of the whole falls
    short of what it consists of. It takes at least as long as the busiest of them.
    """
    weights = [weight for _, weight in terms]
    columns = zip(*[_figures(time) for time, _ in terms], strict=True)
    sums = {name: max(0.0, sum(map(mul, weights, column))) for name, column in zip(_NAMES, columns, strict=True)}
    found = StepTime(**{**sums, "flops": round(sums["flops"])})
    return replace(found, seconds=max(found.seconds, _busiest_seconds(found)))


def _busiest_seconds(time: StepTime) -> float:
    """Return how long the busiest of device, copy engines, links and host works; copies have two engines."""
    device_seconds = time.matmul_seconds + time.attention_seconds + time.elementwise_seconds
    return max(device_seconds, time.copy_seconds / 2, time.launch_seconds, time.communication_seconds)


def weighted_sum(figures: Sequence[Figures] | Figures, weights: Sequence[float]) -> Figures:
    """Return the weighted sum of arrays of one shape, of which there is at least one.

    They are added one after another: a matrix product adds in an order that differs between machines, and so may the
    last digit.
    """
    total = weights[0] * figures[0]
    for weight, each in zip(weights[1:], figures[1:], strict=True):
        total += weight * each
    return total
