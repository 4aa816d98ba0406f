"""The forecast of memory and time for one depth and shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from operator import attrgetter, mul

from autotune.core.program import OPTIMIZER_STEP
from autotune.core.step_time import StepTime
from autotune.core.timeline import Occurrence, Part

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
    return replace(found, seconds=max(found.seconds, found.busiest_seconds))


Stretch = tuple[Part, bool]
"""A part of a step, and whether it is its backward pass."""


@dataclass(frozen=True)
class Forecast:
    """Predicted memory and time of a step at one depth and shape.

    Attributes:
        stretches: peak bytes of tensors in each stretch of a step, by category.
        rounding_share: what the caching allocator counts as allocated beyond tensors' bytes, as a share of them.
        workspace_bytes: what it counts as allocated beyond them, independent of their size.
        unused_bytes: what it reserves beyond what it counts as allocated.
        host_bytes: peak bytes on the host.
        machine_bytes: the same of all processes in one machine together.
        times: the time of each part of a step; empty if speeds are not known.
        between: the occurrence of a micro-batch that stands for those between the first and the last of a step.
    """

    stretches: Mapping[Stretch, Mapping[str, int]]
    rounding_share: float
    workspace_bytes: int
    unused_bytes: int
    host_bytes: int
    machine_bytes: int
    times: Mapping[Part, StepTime]
    between: Occurrence = Occurrence.FURTHER

    @cached_property
    def categories(self) -> Mapping[str, int]:
        """The bytes of tensors at the peak, by category."""
        return max(self.stretches.values(), key=lambda levels: sum(levels.values()), default={})

    @property
    def peak_bytes(self) -> int:
        """The most bytes of tensors."""
        return sum(self.categories.values())

    @property
    def overhead_bytes(self) -> int:
        """What the caching allocator counts beyond :attr:`peak_bytes`: rounding, and workspaces of libraries."""
        return self.workspace_bytes + round(self.rounding_share * self.peak_bytes)

    def step_seconds(self, micro_batches: int) -> float | None:
        """Return the seconds of an optimizer step of that many micro-batches, or None if times are not known."""
        if not self.times:
            return None
        return sum(time.seconds * self.repeats(part, micro_batches) for part, time in self.times.items())

    def repeats(self, part: Part, micro_batches: int) -> int:
        """Return how often the time of a part counts in an optimizer step of so many micro-batches.

        A pass over the dataset before the first step was traced for one micro-batch, and is spread over an epoch.
        Evaluation and saving are left out of the time of a step.
        """
        if part.occurrence is self.between:
            # Beside it, a step of several has one micro-batch of the other occurrence.
            return micro_batches - 1 if micro_batches > 1 or self.between is Occurrence.FURTHER else 1
        return {Occurrence.BEFORE: micro_batches, Occurrence.AFTER: 0}.get(part.occurrence, 1)

    def taking(self, phase: str, other: Forecast, per_step: float) -> Forecast:
        """Return this forecast with a phase of another one, which is for the size at which that phase runs.

        Args:
            per_step: how often the phase runs in an optimizer step.
        """
        taken = {stretch: levels for stretch, levels in other.stretches.items() if stretch[0].phase == phase}
        # In the order of the parts, those of this forecast first.
        kept = (stretch for stretch in self.stretches if stretch[0].phase != phase or stretch in taken)
        stretches = {**{stretch: self.stretches[stretch] for stretch in kept}, **taken}
        times = {
            part: time if part.phase != phase else mixed_times([(other.times.get(part, time), per_step)])
            for part, time in self.times.items()
        }
        found = replace(self, stretches=stretches, times=times)
        totals = [sum(levels.values()) for stretch, levels in stretches.items() if stretch[0].phase == phase]
        # What the allocator reserves beyond goes with the phase that needs the most.
        return replace(found, unused_bytes=other.unused_bytes) if found.peak_bytes in totals else found


def mean_times(forecasts: Sequence[tuple[Forecast, float]]) -> Forecast:
    """Return the first of some forecasts with the weighted mean of the times of all.

    Args:
        forecasts: each with its weight. The weights add up to 1, or less where sizes are timed by larger ones: then
            they count for what depends on the size, which the optimizer does not.
    """
    first, whole = forecasts[0][0], sum(weight for _, weight in forecasts)
    times = {}
    for part in first.times:
        scale = whole if part.phase == OPTIMIZER_STEP else 1.0
        times[part] = mixed_times([(found.times[part], weight / scale) for found, weight in forecasts])
    return replace(first, times=times)
