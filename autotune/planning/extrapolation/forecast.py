"""The forecast of memory and time for one depth and shape, and weighted sums of forecasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import mul

from autotune.core.step_time import StepTime
from autotune.core.timeline import Occurrence, Part
from autotune.planning.extrapolation.times import mixed_times

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
        times: the time of each part of a step; empty if speeds are not known.
    """

    stretches: Mapping[Stretch, Mapping[str, int]]
    rounding_share: float
    workspace_bytes: int
    unused_bytes: int
    host_bytes: int
    times: Mapping[Part, StepTime]

    @cached_property
    def categories(self) -> Mapping[str, int]:
        """The bytes of tensors at the peak, by category."""
        return max(self.stretches.values(), key=lambda levels: sum(levels.values()), default={})

    @cached_property
    def _figures(self) -> tuple[_Places, tuple[int, ...]]:
        """The bytes of each category in each stretch: which these are, and how many."""
        found = {(stretch, name): size for stretch, levels in self.stretches.items() for name, size in levels.items()}
        return _places(tuple(self.stretches), tuple(found)), (*found.values(), 0)

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

    @staticmethod
    def repeats(part: Part, micro_batches: int) -> int:
        """Return how often the time of a part counts in an optimizer step of so many micro-batches.

        A pass over the dataset before the first step was traced for one micro-batch, and is spread over an epoch.
        Evaluation and saving are left out of the time of a step.
        """
        times = {Occurrence.BEFORE: micro_batches, Occurrence.FURTHER: micro_batches - 1, Occurrence.AFTER: 0}
        return times.get(part.occurrence, 1)

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


def mixed(terms: Sequence[tuple[Forecast, float]], alike: Forecast | None = None) -> Forecast:
    """Return the weighted sum of forecasts; negative figures become 0.

    Each stretch of a step is summed separately, because the stretch that a technique changes may not hold the peak.

    Args:
        alike: the sum of the same forecasts for another use of the allocator, which has the same tensors and times.
    """
    found = alike or _without_allocator(terms)

    def summed(figures: Sequence[float]) -> float:
        return max(0.0, sum(weight * figure for (_, weight), figure in zip(terms, figures, strict=True)))

    return replace(
        found,
        rounding_share=summed([forecast.rounding_share for forecast, _ in terms]),
        workspace_bytes=round(summed([forecast.workspace_bytes for forecast, _ in terms])),
        unused_bytes=round(summed([forecast.unused_bytes for forecast, _ in terms])),
    )


def _without_allocator(terms: Sequence[tuple[Forecast, float]]) -> Forecast:
    figures = [forecast._figures for forecast, _ in terms]
    order, picks = _aligned(tuple([places for places, _ in figures]))
    weights = [weight for _, weight in terms]
    picked = [[sizes[place] for place in pick] for pick, (_, sizes) in zip(picks, figures, strict=True)]
    stretches: dict[Stretch, dict[str, int]] = {stretch: {} for stretch in order.stretches}
    for (stretch, name), column in zip(order.names, zip(*picked, strict=True), strict=True):
        size = sum(map(mul, weights, column))
        if size >= 1:
            stretches[stretch][name] = round(size)
    parts = [part for part in terms[0][0].times if all(part in forecast.times for forecast, _ in terms)]
    host_bytes = sum(map(mul, weights, [forecast.host_bytes for forecast, _ in terms]))
    return Forecast(
        stretches=stretches,
        rounding_share=0.0,
        workspace_bytes=0,
        unused_bytes=0,
        host_bytes=round(max(0.0, host_bytes)),
        times={part: mixed_times([(forecast.times[part], weight) for forecast, weight in terms]) for part in parts},
    )


@dataclass(frozen=True, eq=False)
class _Places:
    """The stretches of a forecast, and the categories in each that have bytes; the same object where these are equal.

    Sums of forecasts are computed for each candidate of a search space, and most forecasts have the same.
    """

    stretches: tuple[Stretch, ...]
    names: tuple[tuple[Stretch, str], ...]


_places = lru_cache(maxsize=None)(_Places)


@lru_cache(maxsize=4096)
def _aligned(given: tuple[_Places, ...]) -> tuple[_Places, tuple[tuple[int, ...], ...]]:
    """Return the places of all, and for each, where its figures for them are; the last one where it has none."""
    stretches = tuple(dict.fromkeys(stretch for places in given for stretch in places.stretches))
    names = tuple(dict.fromkeys(name for places in given for name in places.names))
    picks = []
    for places in given:
        known = {name: index for index, name in enumerate(places.names)}
        picks.append(tuple([known.get(name, len(known)) for name in names]))
    return _Places(stretches, names), tuple(picks)
