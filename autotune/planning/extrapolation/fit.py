"""Fits the traces of one technique combination and forecasts any depth and shape from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import TypeVar

from autotune.core.batch_geometry import Shape
from autotune.core.plan import AllocatorUse
from autotune.core.protocol import TraceReply
from autotune.core.timeline import Occurrence, Part, Section
from autotune.core.traced import Replayed
from autotune.planning.extrapolation.alignment import from_end, from_start
from autotune.planning.extrapolation.forecast import Forecast, Stretch
from autotune.planning.extrapolation.series import Aligned, Levels, Series, SeriesLevels
from autotune.planning.extrapolation.shape import Anchors, layer_weights
from autotune.planning.extrapolation.times import mixed_times
from autotune.trainers.prompts import GENERATION

T = TypeVar("T")
DEFAULT_USE = AllocatorUse()
Point = tuple[int, Shape]
"""A depth in layers, and a shape."""


def points(depths: Sequence[int], anchors: Anchors) -> list[Point]:
    """Return the points at which a technique combination has to be traced.

    Beyond the anchors' chunk only the loss changes, not the layers, so that shape is traced at one depth.
    """
    known = [(depth, shape) for depth in depths for shape in anchors.shapes]
    return [*known, (depths[0], anchors.beyond)] if anchors.beyond is not None else known


class Fit:
    """The traces of one technique combination at :func:`points`, and forecasts for other depths and shapes.

    Example: traces at 2 and 3 layers give a forecast for 32 layers: at each moment, the figure at 2 layers plus 30
    times the difference of the two.

    Args:
        edges: whether the first layers and the last ones are unlike those between; see :class:`Aligned`.

    Attributes:
        assumptions: what the traces assumed, in sentences.
        aligned: whether the moments of the traces could be aligned, so that memory is extrapolated moment by moment. If
            not, only the peaks are extrapolated, which may belong to different moments. Saving under an engine does not
            count: of what is gathered for a checkpoint, the peak alone is wanted.
    """

    def __init__(self, anchors: Anchors, replies: Mapping[Point, TraceReply], *, edges: bool = False) -> None:
        self._anchors = anchors
        self._edges = edges
        self._replies = replies
        self._forecasts: dict[tuple[int, Shape, int], Forecast] = {}
        self._points = sorted(replies)
        self.assumptions = frozenset(assumed for reply in replies.values() for assumed in reply.assumptions)
        self._depths = sorted({layers for layers, _ in replies})
        self._between = next((reply.between for reply in replies.values()), Occurrence.FURTHER)
        self._parts = tuple(dict.fromkeys(section.part for reply in replies.values() for section in reply.sections))
        # What is gathered for a checkpoint, one tensor after another, does not tell layers apart.
        alike = {part for part in self._parts if edges and part.occurrence is Occurrence.AFTER}
        aligned = {part: self._aligned(part) if part not in alike else None for part in self._parts}
        self.aligned = all(found is not None or part in alike for part, found in aligned.items())
        self._stretches = [
            stretch
            for part, found in aligned.items()
            for stretch in (found if found is not None else self._peaks(part))
        ]

    def forecast(
        self, layers: int, shape: Shape, micro_batches: int, allocator: AllocatorUse = DEFAULT_USE
    ) -> Forecast:
        """Return the forecast for a depth, a shape, a number of micro-batches per optimizer step, and an allocator."""
        key = (layers, shape, micro_batches)
        if key not in self._forecasts:
            self._forecasts[key] = self._forecast(*key)
        share, workspace_bytes = self._rounding(allocator)
        return replace(
            self._forecasts[key],
            rounding_share=share,
            workspace_bytes=workspace_bytes,
            unused_bytes=self._unused_bytes(shape, allocator),
        )

    def _forecast(self, layers: int, shape: Shape, micro_batches: int) -> Forecast:
        """Return the forecast of tensors and times, which do not depend on the allocator."""
        weights, generating = (self._weights(layers, shape, generating=each) for each in (False, True))
        parts = [part for part in self._parts if part.occurrence is not Occurrence.FURTHER or micro_batches > 1]
        stretches: dict[Stretch, Mapping[str, int]] = {}
        for aligned in self._stretches:
            if aligned.stretch[0] in parts:
                stretches[aligned.stretch] = aligned.highest(weights)
        hosts, machines = (
            [_weighted(self._each(part, figure), weights) for part in parts]
            for figure in (lambda section: section.host_bytes, lambda section: section.machine_bytes)
        )
        return Forecast(
            stretches=stretches,
            rounding_share=0.0,
            workspace_bytes=0,
            unused_bytes=0,
            host_bytes=max(0, round(max(hosts))),
            machine_bytes=max(0, round(max(machines))),
            times={
                part: mixed_times([(time, weight) for time, weight in zip(known_times, by, strict=True) if time])
                for part in parts
                for by in (generating if part.phase == GENERATION else weights,)
                if all(known_times := self._each(part, lambda section: section.time))
            },
            between=self._between,
        )

    @property
    def longest(self) -> float:
        """The most tokens of a traced row."""
        return max(shape.tokens for shape in self._anchors.shapes)

    def covers(self, shape: Shape) -> bool:
        """Return whether figures at a shape follow from the traces."""
        return self._anchors.covers(shape)

    def course(self, stretch: Stretch, layers: int, shape: Shape) -> list[Levels]:
        """Return the bytes of tensors at each moment of a stretch, for a depth and a shape.

        At the peak alone if the moments could not be aligned; none if no trace has the stretch.
        """
        weights, (shallow, *deep) = self._weights(layers, shape), self._depths
        insertions = round((layers - shallow) / (deep[0] - shallow)) if deep else 0
        found = (aligned.course(weights, insertions) for aligned in self._stretches if aligned.stretch == stretch)
        return [levels for course in found for levels in course]

    def weighted(self, layers: int, shape: Shape) -> list[tuple[Point, TraceReply, float]]:
        """Return each trace with the weight of its figures in those of a depth and a shape."""
        weights = zip(self._points, self._weights(layers, shape), strict=True)
        return [(point, self._replies[point], weight) for point, weight in weights]

    def differs_by_sizes(self, other: Fit, tolerance: float) -> bool:
        """Whether the difference in a micro-batch's memory to another technique combination depends on the shape.

        Where a single shape was traced, that is not known, and any difference may.

        Args:
            tolerance: share of the memory up to which differences are treated as equal.
        """
        for stretch in {found.stretch for found in self._stretches if found.stretch[0].of_micro_batch}:
            for depth in self._depths:
                differences, sizes = [], []
                for shape in self._anchors.shapes:
                    mine, theirs = self._highest_at((depth, shape), stretch), other._highest_at((depth, shape), stretch)
                    differences.append(mine - theirs)
                    sizes.append(mine)
                differences += [0] if len(sizes) == 1 else []
                if max(differences) - min(differences) > tolerance * max(sizes):
                    return True
        return False

    def _highest_at(self, point: Point, stretch: Stretch) -> int:
        if point not in self._replies:
            return 0
        section = _section(self._replies[point], stretch[0])
        return max(section.totals[_moments_of(section, in_backward=stretch[1])], default=0)

    def _rounding(self, allocator: AllocatorUse) -> tuple[float, int]:
        """Return what the allocator adds to the bytes of tensors: a share of them, and a constant in bytes.

        Which blocks are split varies irregularly with the size, so that extrapolating single figures would multiply
        random differences.
        """
        overheads = [
            replayed.allocated_bytes - reply.device.bytes for reply, replayed in self._replays(allocator).values()
        ]
        always = max(0, min(overheads))
        sizes = [max(1, reply.device.bytes) for reply in self._replies.values()]
        return fmean((added - always) / size for added, size in zip(overheads, sizes, strict=True)), always

    def _replays(self, allocator: AllocatorUse) -> Mapping[Point, tuple[TraceReply, Replayed]]:
        return {point: (reply, reply.replayed(allocator)) for point, reply in self._replies.items()}

    def _unused_bytes(self, wanted: Shape, allocator: AllocatorUse) -> int:
        """Return the bytes that the allocator reserves and does not use: they depend on block sizes, not on depth."""
        by_tokens: dict[float, list[int]] = {}
        for (_, shape), (_, replayed) in self._replays(allocator).items():
            unused_bytes = max(0, (replayed.reserved_bytes or 0) - replayed.allocated_bytes)
            by_tokens.setdefault(shape.rows * shape.tokens, []).append(unused_bytes)
        known = sorted((tokens, fmean(found)) for tokens, found in by_tokens.items())
        return round(_between(known, wanted.rows * wanted.tokens))

    def _weights(self, layers: int, shape: Shape, *, generating: bool = False) -> tuple[float, ...]:
        by_depth = dict(zip(self._depths, layer_weights(self._depths, layers), strict=True))
        by_shape = self._anchors.sums(shape, generating=generating)
        weights = {(depth, known): by_depth[depth] * by_shape[known] for depth in self._depths for known in by_shape}
        beyond, excess = self._anchors.beyond, self._anchors.excess(shape)
        if beyond is not None and excess:
            for known, weight in self._anchors.sums(beyond, generating=generating).items():
                weights[self._depths[0], known] -= excess * weight
            weights[self._depths[0], beyond] = excess
        return tuple(weights.get(point, 0.0) for point in self._points)

    def _each(self, part: Part, figure: Callable[[Section], T]) -> list[T]:
        return [figure(_section(self._replies[point], part)) for point in self._points]

    def _peaks(self, part: Part) -> list[Aligned]:
        found = (
            Series((part, backward), self._each(part, partial(_peak, in_backward=backward)))
            for backward in (False, True)
        )
        return [Aligned(series, series, (0,) * series.moments, (False,) * series.moments) for series in found]

    def _aligned(self, part: Part) -> list[Aligned] | None:
        """Return the memory of a part at the moments that all points share, or None if they cannot be aligned."""
        sections = dict(zip(self._points, self._each(part, lambda section: section), strict=True))
        # Deeper or larger traces have whole layers, or chunks of the loss, inserted.
        shortest = min(sections.values(), key=lambda section: len(section.moments))
        places: dict[Point, tuple[list[int], list[int]]] = {}
        for point, section in sections.items():
            first, last = (align(shortest.moments, section.moments) for align in (from_start, from_end))
            if first is None or last is None:
                return None
            places[point] = first, last
        moved = {point: [end - start for start, end in zip(*both, strict=True)] for point, both in places.items()}
        layers = next(
            (found for (depth, _), found in moved.items() if depth > self._depths[0]), [0] * len(shortest.moments)
        )
        apart = [any(found) for found in zip(*moved.values(), strict=True)]
        found_stretches = []
        for backward in (False, True):
            kept = _moments_of(shortest, in_backward=backward)
            start, end = (
                Series((part, backward), [_cut(sections[point], both[side][kept]) for point, both in places.items()])
                for side in (0, 1)
            )
            if not start.moments:
                continue
            found_stretches.append(Aligned(start, end, layers[kept], apart[kept], self._edges))
        return found_stretches


def _section(reply: TraceReply, part: Part) -> Section:
    """Return the section of a part, empty if there is none: a step of one micro-batch has no further micro-batch."""
    return next((section for section in reply.sections if section.part == part), Section(part, (), {}))


def _moments_of(section: Section, *, in_backward: bool) -> slice:
    return slice(section.backward, None) if in_backward else slice(0, section.backward)


def _cut(section: Section, moments: Sequence[int]) -> SeriesLevels:
    return {name: [values[moment] for moment in moments] for name, values in section.levels.items()}


def _peak(section: Section, *, in_backward: bool) -> SeriesLevels:
    chosen = _moments_of(section, in_backward=in_backward)
    totals = section.totals[chosen]
    if not totals:
        return {}
    highest = totals.index(max(totals))
    return {name: [values[chosen][highest]] for name, values in section.levels.items()}


def _between(known: Sequence[tuple[float, float]], place: float) -> float:
    """Return the figure at a place by linear interpolation; outside of the known places, the nearest figure."""
    for (left, low), (right, high) in pairwise(known):
        if place <= right:
            return low + (high - low) * max(0.0, place - left) / (right - left)
    return known[-1][1]


def _weighted(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True))
