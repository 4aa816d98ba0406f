"""Extrapolates a step to all layers from traces of few layers, moment by moment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import ne
from statistics import fmean

import numpy as np

from autotune.core.jobs.traced import TraceReply
from autotune.core.program import CONSTRUCTION
from autotune.core.step_time import StepTime
from autotune.core.timeline import Occurrence, Section
from autotune.planning.extrapolation.forecast import Aligned, Figures, Forecast, Stretch, mixed_times
from autotune.techniques.trace_impact import PlanImpact

_UNUSED_GROWTH = 0.3
"""Share of the allocator's unused bytes (reserved minus allocated) that grows with the peak; the rest is constant.

Fitted to full-depth traces of 82 configurations of `benchmarks/gpu/cases.py` (Qwen2.5 shapes of 0.5B, 1.5B and 7B,
seven trainers): reserved memory is off by 0.0 % in the mean, -10.6 to +7.3 %; with 0 by -2.3 %, -12.6 to +4.5 %. For 33
others (other shapes, longer rows, a teacher) by -0.1 %, -12.9 to +5.7 %; with 0 by -2.1 %, -14.5 to +2.9 %."""

_NO_IMPACT = PlanImpact()
_TEMPORARY = "temporary"
"""One of :class:`autotune.virtual.recording.records.Category`."""


class Fit:
    """Extrapolates the traces of a training plan at one micro-batch size and one or two depths to all layers.

    Example: the forecast for 32 layers from traces of 2 and 3 layers is, at each moment, the figure of 2 layers plus 30
    times the difference of the two.

    Args:
        replies: the traces, by number of layers.
        layers: number of layers of the whole model.
        edges: periods of layers at either end that differ from those between; see ``forecast.Aligned``.
        impact: the effect of the plan's techniques. Where weights are gathered ahead, moments of two depths cannot be
            matched, so that of each operator only the highest moment is extrapolated: the highest of few layers need
            not be the highest of all.

    Attributes:
        assumptions: those of the traces, in sentences.
        stretches: memory of the whole model in each stretch of a step.
        aligned: whether memory is extrapolated moment by moment; else only peaks are, which may belong to different
            moments. Saving with an engine is excluded: only its peak is needed.
    """

    def __init__(
        self, replies: Mapping[int, TraceReply], layers: int, *, edges: int = 0, impact: PlanImpact = _NO_IMPACT
    ) -> None:
        self._edges = edges
        self._broadcast_bytes = impact.broadcast_bytes
        self._depths = sorted(replies)
        self._replies = [replies[depth] for depth in self._depths]
        self._weights = layer_weights(self._depths, layers)
        # The weight of the deeper trace is the number of its additional periods of layers in the whole model.
        self._insertions = round(sum(self._weights[1:]))
        self.assumptions = frozenset(assumed for reply in self._replies for assumed in reply.assumptions)
        self._between = self._replies[0].between
        parts = dict.fromkeys(section.part for reply in self._replies for section in reply.sections)
        # Of several runs of a part, the first. A trace may lack a part, such as further micro-batches of one.
        found = [{section.part: section for section in reversed(reply.sections)} for reply in self._replies]
        self._sections = {part: [each.get(part, Section(part, (), {})) for each in found] for part in parts}
        self.aligned = True
        self.stretches: dict[Stretch, Aligned] = {}
        for part, sections in self._sections.items():
            # Saving gathers one tensor after another, so the moments of its layers cannot be distinguished.
            is_saving = edges > 0 and part.occurrence is Occurrence.AFTER
            unmatched = is_saving or (impact.gathers_ahead > 0 and len(sections) > 1)
            places = None if unmatched else matching_moments(sections)
            self.aligned = self.aligned and (is_saving or places is not None)
            for backward in (False, True):
                self._add_stretch((part, backward), places)

    def forecast(self, micro_batches: int, expandable_segments: bool = False) -> Forecast:
        """Return the forecast for a number of micro-batches per optimizer step, and segments of the allocator."""
        sections = {
            part: each
            for part, each in self._sections.items()
            if part.occurrence is not Occurrence.FURTHER or micro_batches > 1
        }
        replays = [reply.replayed(expandable_segments) for reply in self._replies]
        tensors = [reply.device.bytes for reply in self._replies]
        # The allocator's overhead over tensor bytes is modelled as a share plus a constant: which blocks are split
        # varies irregularly with size, so extrapolating single figures would amplify random differences.
        overheads = [replayed.allocated_bytes - size for replayed, size in zip(replays, tensors, strict=True)]
        fixed = max(0, min(overheads))
        unused = (max(0, (each.reserved_bytes or 0) - each.allocated_bytes) for each in replays)
        returned = ((each.reserved_bytes or 0) - (each.needed_bytes or 0) for each in replays)
        stretches = {at: aligned for at, aligned in self.stretches.items() if at[0] in sections}
        peaks = [max(max(each[index].totals, default=0) for each in sections.values()) for index in range(len(replays))]
        growth = max(sum(aligned.highest[1].values()) for aligned in stretches.values()) / fmean(peaks)
        on_host = [[(section.host_bytes, section.machine_bytes) for section in each] for each in sections.values()]
        host_bytes, machine_bytes = np.max([np.dot(self._weights, each) for each in on_host], axis=0).round()
        return Forecast(
            stretches=stretches,
            rounding_share=fmean((more - fixed) / max(1, size) for more, size in zip(overheads, tensors, strict=True)),
            workspace_bytes=fixed,
            # `PlanTracer.whole` replaces this approximation at full depth.
            unused_bytes=round(fmean(unused) * (1 + _UNUSED_GROWTH * (growth - 1))),
            returned_bytes=round(fmean(returned)),
            host_bytes=max(0, int(host_bytes)),
            machine_bytes=max(0, int(machine_bytes)),
            times={part: time for part, each in sections.items() if (time := self._time(each)) is not None},
            between=self._between,
        )

    def _time(self, sections: Sequence[Section]) -> StepTime | None:
        """Return the time of a part; None unless it is known at all depths."""
        times = [section.time for section in sections if section.time is not None]
        return mixed_times([*zip(times, self._weights, strict=True)]) if len(times) == len(sections) else None

    def weighted(self) -> list[tuple[int, TraceReply, float]]:
        """Return each trace with its number of layers, and the weight of its figures in those of the whole model."""
        return list(zip(self._depths, self._replies, self._weights, strict=True))

    def _add_stretch(self, stretch: Stretch, places: Sequence[tuple[Sequence[int], Sequence[int]]] | None) -> None:
        """Add a stretch, if it has moments: at the traces' :func:`matching_moments`; None: at its highest moment."""
        part, backward = stretch
        sections = self._sections[part]
        if places is None:
            first = last = _peaks(sections, backward)
            moved = [0] * max(map(len, first))
        else:
            kept = _pass_slice(min(sections, key=lambda section: len(section.moments)), backward)
            first, last = ([indices[kept] for indices in side] for side in zip(*places, strict=True))
            moved = [end - start for start, end in zip(first[-1], last[-1], strict=True)]
        names = max(([each.moments[index] for index in at] for each, at in zip(sections, first, strict=True)), key=len)
        if names:
            kinds = list(dict.fromkeys(name for section in sections for name in section.levels))
            start, end = (self._extrapolated(sections, kinds, indices) for indices in (first, last))
            if self._broadcast_bytes and part.phase == CONSTRUCTION:
                self._limit_broadcast(sections, kinds, start, end)
            if places is None:
                highest = int(end.sum(axis=0).argmax())
                names, moved, start, end = [names[highest]], [0], start[:, [highest]], end[:, [highest]]
            self.stretches[stretch] = Aligned(names, kinds, start, end, moved, self._insertions, self._edges)

    def _extrapolated(
        self, sections: Sequence[Section], categories: Sequence[str], indices: Sequence[Sequence[int]]
    ) -> Figures:
        """Return the bytes of the whole model, categories x moments, given the moments' indices in each section."""
        figures = np.zeros((len(categories), max(map(len, indices))))
        for weight, section, chosen in zip(self._weights, sections, indices, strict=True):
            for row, name in enumerate(categories):
                values = np.array(section.levels.get(name, (0,) * len(section.moments)), dtype=np.float64)
                figures[row, : len(chosen)] += weight * values[chosen]
        return figures

    def _limit_broadcast(self, sections: Sequence[Section], categories: Sequence[str], *figures: Figures) -> None:
        """Limit the bytes that the engine copies while it is constructed, at the construction's first moment.

        A bucket ends after the tensor that fills it, so a trace may have more than the limit.
        """
        traced = [section.levels.get(_TEMPORARY, (0,))[0] for section in sections]
        for row in (index for index, name in enumerate(categories) if name == _TEMPORARY):
            for each in figures:
                each[row, 0] = min(each[row, 0], max(self._broadcast_bytes, *traced))


def layer_weights(depths: Sequence[int], layers: int) -> tuple[float, ...]:
    """Return the weights of figures at one or two traced depths in those of ``layers`` layers: figures are affine.

    Raises:
        ValueError: there is a single depth, and it differs from ``layers``.
    """
    if len(depths) == 1:
        if depths[0] != layers:
            raise ValueError(f"{layers} layers do not follow from {depths[0]}")
        return (1.0,)
    short, long = depths
    share = (layers - short) / (long - short)
    return (1.0 - share, share)


_FLAT = re.compile(r" \[\d+\]$")


def _names(section: Section) -> list[str]:
    """Return the names of a section's moments without the lengths of 1D tensors, which may grow with depth.

    Examples: the norms of all weights for clipping, and an engine's buffers.
    """
    return [_FLAT.sub("", name) for name in section.moments]


def _pass_slice(section: Section, in_backward: bool) -> slice:
    return slice(section.backward, None) if in_backward else slice(0, section.backward)


def _peaks(sections: Sequence[Section], in_backward: bool) -> list[list[int]]:
    """Return for each section the indices of the highest moment of a pass, and of that of each shared name."""
    found: list[dict[str, int]] = []
    for section in sections:
        names, totals = _names(section), section.totals
        highest: dict[str, int] = {}
        for index in range(len(names))[_pass_slice(section, in_backward)]:
            if names[index] not in highest or totals[index] > totals[highest[names[index]]]:
                highest[names[index]] = index
        found.append(highest)
    shared = [name for name in found[0] if all(name in each for each in found)]
    return [
        [max(each.values(), key=section.totals.__getitem__), *(each[name] for name in shared)] if each else []
        for section, each in zip(sections, found, strict=True)
    ]


def matching_moments(sections: Sequence[Section]) -> list[tuple[list[int], list[int]]] | None:
    """Return for each section the indices of the shortest one's moments, aligned from the start and from the end.

    Deeper traces are shallower ones with whole layers inserted; if these are not, the result is None.
    """
    shortest = min(sections, key=lambda section: len(section.moments))
    found = []
    for section in sections:
        # Names of moments include shapes, which distinguish the head from a layer with the same operators.
        first, last = (align(_names(shortest), _names(section)) for align in (match_from_start, match_from_end))
        if first is None or last is None:
            return None
        found.append((first, last))
    return found


# Moments that have to match after an insertion, tried in this order. Long matches distinguish layers of similar parts,
# and short ones find two insertions close to each other.
_MATCH_LENGTHS = (48, 24, 12, 6, 3)


def match_from_start(short: Sequence[str], long: Sequence[str]) -> list[int] | None:
    """Return, for each moment of ``short``, the index of the matching moment in ``long``, matching from the beginning.

    ``long`` has to be ``short`` with moments inserted, otherwise the result is None. Each insertion is assumed to be as
    short as possible.

    Example: ``short`` is ``a b``, ``long`` is ``a x x b``; the result is ``[0, 3]``.
    """
    matches: list[int] = []
    position: int | None = 0
    while position is not None:
        rest = short[len(matches) :]
        alike = [*map(ne, rest, long[position:]), True].index(True)
        matches += range(position, position + alike)
        if alike == len(rest):
            return matches
        position = _after_insertion(rest[alike:], long, position + alike)
    return None


def _after_insertion(rest: Sequence[str], long: Sequence[str], position: int) -> int | None:
    """Return the index at which ``long`` continues with ``rest``, or None if it does not."""
    for pattern in (list(rest[:count]) for count in _MATCH_LENGTHS):
        for start in range(position + 1, len(long) - len(pattern) + 1):
            if long[start] == pattern[0] and list(long[start : start + len(pattern)]) == pattern:
                return start
    return None


def match_from_end(short: Sequence[str], long: Sequence[str]) -> list[int] | None:
    """Return the same as :func:`match_from_start`, matching from the end."""
    matches = match_from_start(short[::-1], long[::-1])
    return None if matches is None else [len(long) - 1 - index for index in reversed(matches)]
