"""The predicted memory through one optimizer step: bytes by category at each moment, and the parts of the need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autotune.core.timeline import Part

MAX_MOMENTS = 240
"""Approximate number of moments of a thinned timeline: a chart of 700 pixels shows no more."""
_MIN_STRETCH_MOMENTS = 12
VLLM = "vLLM"
"""Category of vLLM's memory on the same device, in addition to PyTorch's categories."""
AT_REST = "training at rest"
"""Category of the training's device memory, without context, while vLLM receives weights or generates."""
OUTSIDE_TENSORS = ("context", "process", "rounding", "fragmentation")
"""Parts of a breakdown that are not bytes of tensors."""


@dataclass(frozen=True)
class Mark:
    """The start of a part of the run, or of its backward pass.

    Attributes:
        start: index of its first moment.
    """

    part: Part
    backward: bool
    start: int


@dataclass(frozen=True)
class MemoryTimeline:
    """The course of the device's memory through one optimizer step on the largest micro-batch.

    Moments are points right before memory is freed, in order and not to scale in time. The first micro-batch and one
    further one represent all. The phases before and after the steps are included, since they may have the peak.

    Attributes:
        marks: ascending; the first one starts with moment 0.
        levels: bytes at each moment, by PyTorch's category and :data:`VLLM`.
        peak: index of the moment with the most tensor bytes.
        breakdown: the parts of the need at that moment, allocator and context included
            (``MemoryEstimate.breakdown``).
        error: share by which the need may be off.
        followed: whether each moment was traced or extrapolated; else each stretch has only its peak.
        micro_batches: of an optimizer step.
    """

    marks: tuple[Mark, ...]
    levels: Mapping[str, tuple[int, ...]]
    peak: int
    breakdown: Mapping[str, int]
    error: float
    followed: bool
    micro_batches: int

    @property
    def outline(self) -> MemoryTimeline:
        """The timeline without its moments."""
        return replace(self, marks=(), levels={})

    @property
    def moments(self) -> int:
        """Number of moments."""
        return max(map(len, self.levels.values()), default=0)

    @property
    def totals(self) -> tuple[int, ...]:
        """Sum over all categories at each moment."""
        return tuple(map(sum, zip(*self.levels.values(), strict=True)))

    @property
    def need_bytes(self) -> int:
        """Device memory that is needed, context included."""
        return sum(self.breakdown.values())

    def at(self, moment: int) -> dict[str, int]:
        """Return the bytes at a moment, by category, without empty categories."""
        return {name: sizes[moment] for name, sizes in self.levels.items() if sizes[moment]}

    def stretch(self, place: int) -> range:
        """Return the moments that belong to the mark with this index."""
        ends = [*(mark.start for mark in self.marks[1:]), self.moments]
        return range(self.marks[place].start, ends[place])

    def thinned(self) -> MemoryTimeline:
        """Return the timeline with about :data:`MAX_MOMENTS` moments: of each group of neighbours, the highest.

        Stretches are thinned in proportion to their moments; short ones keep all of theirs.
        """
        if self.moments <= MAX_MOMENTS:
            return self
        totals, kept, marks = self.totals, list[int](), list[Mark]()
        for place, mark in enumerate(self.marks):
            moments = self.stretch(place)
            count = min(len(moments), max(_MIN_STRETCH_MOMENTS, MAX_MOMENTS * len(moments) // self.moments))
            marks.append(replace(mark, start=len(kept)))
            for group in _groups(moments, count):
                kept.append(self.peak if self.peak in group else max(group, key=totals.__getitem__))
        levels = {name: tuple([sizes[moment] for moment in kept]) for name, sizes in self.levels.items()}
        return replace(self, marks=tuple(marks), levels=levels, peak=kept.index(self.peak))


def _groups(moments: Sequence[int], count: int) -> list[Sequence[int]]:
    """Return ``count`` groups of neighbouring moments, about equal in size."""
    ends = [len(moments) * place // count for place in range(count + 1)] if count else [0]
    return [moments[first:end] for first, end in pairwise(ends)]
