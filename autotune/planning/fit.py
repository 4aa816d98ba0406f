"""Traces of one way to train, at few depths and shapes, and what follows from them for any depth and shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from statistics import fmean
from typing import TypeVar

from autotune.core.protocol import TraceReply
from autotune.core.step_time import StepTime
from autotune.core.timeline import Part, Section
from autotune.planning.alignment import from_end, from_start
from autotune.planning.shape import Basis, Shape, layer_weights, shape_weights
from autotune.planning.times import mixed_times

T = TypeVar("T")
Point = tuple[int, Shape]
"""A depth in layers, and a shape."""


@dataclass(frozen=True)
class Forecast:
    """What follows for one depth and shape.

    Attributes:
        peak_bytes: the most bytes of tensors.
        categories: its parts.
        overhead_bytes: what the caching allocator counts beyond that: rounding, and workspaces of libraries.
        reserved_ratio: reserved over allocated bytes.
        host_bytes: the most bytes beside the device.
        times: of each part of a step; empty where speeds are not known.
    """

    peak_bytes: int
    categories: Mapping[str, int]
    overhead_bytes: int
    reserved_ratio: float
    host_bytes: int
    times: Mapping[Part, StepTime]

    def step_seconds(self, micro_batches: int) -> float | None:
        """Return how long an optimizer step of so many micro-batches takes, or None where it is not known."""
        if not self.times:
            return None
        seconds = {part: time.seconds for part, time in self.times.items()}
        further = seconds.get(Part.FURTHER_MICRO_BATCH, 0.0) * (micro_batches - 1)
        return seconds[Part.FIRST_MICRO_BATCH] + further + seconds[Part.OPTIMIZER]


class Fit:
    """Traces at every pair of some depths and some shapes.

    Attributes:
        aligned: whether the traces have the same moments, so that each moment's memory could be followed. Where they
            have not, only the peaks are, and they may be those of different moments.
    """

    def __init__(self, basis: Basis, replies: Mapping[Point, TraceReply]) -> None:
        self._basis = basis
        self._replies = replies
        self._points = sorted(replies)
        self._depths = sorted({layers for layers, _ in replies})
        self._shapes = sorted({shape for _, shape in replies})
        parts = {part: self._aligned(part) for part in Part}
        self.aligned = all(found is not None for found in parts.values())
        self._parts = {part: found if found is not None else [self._peaks(part)] for part, found in parts.items()}

    def forecast(self, layers: int, shape: Shape, micro_batches: int) -> Forecast:
        """Return what follows for a depth, a shape, and so many micro-batches in an optimizer step."""
        weights = self._weights(layers, shape)
        parts = [part for part in Part if part is not Part.FURTHER_MICRO_BATCH or micro_batches > 1]
        found = [(*series.highest(weights), series) for part in parts for series in self._parts[part]]
        _, moment, series = max(found, key=lambda item: item[0])
        categories = series.categories(weights, moment) if moment >= 0 else {}
        peak_bytes = sum(categories.values())
        return Forecast(
            peak_bytes=peak_bytes,
            categories=categories,
            overhead_bytes=self._overhead_bytes(peak_bytes),
            reserved_ratio=self._reserved_ratio,
            host_bytes=max(
                (max(0, round(_weighted(self._each(part, lambda section: section.host_bytes), weights))))
                for part in parts
            ),
            times=self._times(parts, weights),
        )

    def _overhead_bytes(self, peak_bytes: int) -> int:
        """Return what the allocator adds: a part that is always there, and a share of what tensors hold.

        Which blocks are split and which are not differs from size to size without a rule, so that following single
        figures to another size would multiply what is chance in them.
        """
        overheads = [reply.allocated_bytes - reply.device.bytes for reply in self._replies.values()]
        always = max(0, min(overheads))
        shares = [
            (overhead - always) / max(1, reply.device.bytes)
            for overhead, reply in zip(overheads, self._replies.values(), strict=True)
        ]
        return always + round(fmean(shares) * peak_bytes)

    @property
    def _reserved_ratio(self) -> float:
        return fmean(
            max(1.0, (reply.reserved_bytes or 0) / max(1, reply.allocated_bytes)) for reply in self._replies.values()
        )

    def _weights(self, layers: int, shape: Shape) -> tuple[float, ...]:
        by_depth = dict(zip(self._depths, layer_weights(self._depths, layers), strict=True))
        by_shape = dict(zip(self._shapes, shape_weights(self._basis, self._shapes, shape), strict=True))
        return tuple(by_depth[point[0]] * by_shape[point[1]] for point in self._points)

    def _times(self, parts: Sequence[Part], weights: Sequence[float]) -> dict[Part, StepTime]:
        times: dict[Part, StepTime] = {}
        for part in parts:
            known = self._each(part, lambda section: section.time)
            if part is not Part.BEFORE and all(time is not None for time in known):
                times[part] = mixed_times([(time, weight) for time, weight in zip(known, weights, strict=True) if time])
        return times

    def _each(self, part: Part, figure: Callable[[Section], T]) -> list[T]:
        return [figure(_section(self._replies[point], part)) for point in self._points]

    def _peaks(self, part: Part) -> _Series:
        return _series([_peak_alone(section) for section in self._each(part, lambda section: section)], 1)

    def _aligned(self, part: Part) -> list[_Series] | None:
        """Return one or two series of levels by point, of equally many moments, or None where there are none."""
        sections = dict(zip(self._points, self._each(part, lambda section: section), strict=True))
        # What is deeper or larger has whole layers, or chunks of the loss, inserted.
        short = min((sections[point].moments for point in self._points), key=len)
        found_series = []
        for align in (from_start, from_end):
            series = []
            for point in self._points:
                chosen = align(short, sections[point].moments)
                if chosen is None:
                    return None
                levels = sections[point].levels
                series.append({name: [values[index] for index in chosen] for name, values in levels.items()})
            found_series.append(_series(series, len(short)))
        return found_series


_Levels = Mapping[str, Sequence[int]]


def _section(reply: TraceReply, part: Part) -> Section:
    """Return the section of a part; a step of a single micro-batch has no further one."""
    return next((section for section in reply.sections if section.part is part), Section(part, (), {}))


def _peak_alone(section: Section) -> _Levels:
    totals = section.totals
    if not totals:
        return {}
    highest = totals.index(max(totals))
    return {name: [values[highest]] for name, values in section.levels.items()}


@dataclass(frozen=True)
class _Series:
    """Levels of equally many moments at every point, and the totals of all categories."""

    levels: tuple[_Levels, ...]
    totals: tuple[tuple[int, ...], ...]

    def highest(self, weights: Sequence[float]) -> tuple[float, int]:
        """Return the most bytes that follow, and at which moment."""
        totals = [sum(map(mul, weights, values)) for values in zip(*self.totals, strict=True)]
        best = max(totals, default=0.0)
        return best, totals.index(best) if totals else -1

    def categories(self, weights: Sequence[float], moment: int) -> dict[str, int]:
        """Return the bytes by category at a moment."""
        found: dict[str, float] = {}
        for weight, levels in zip(weights, self.levels, strict=True):
            for name, values in levels.items():
                found[name] = found.get(name, 0.0) + weight * values[moment]
        return {name: round(size) for name, size in found.items() if round(size) > 0}


def _series(levels: Sequence[_Levels], moments: int) -> _Series:
    zeros = [0] * moments
    totals = tuple(tuple(map(sum, zip(*point.values(), strict=True))) or tuple(zeros) for point in levels)
    return _Series(tuple(levels), totals)


def _weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True))
