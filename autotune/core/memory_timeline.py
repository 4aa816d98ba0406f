"""The predicted memory of one optimizer step, moment by moment: live memory by category, and the parts of the need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autotune.core.timeline import Part

MOST_MOMENTS = 240
"""About how many moments a timeline keeps: as many as a chart of 700 pixels can show."""
_FEWEST_IN_A_STRETCH = 12
VLLM = "vLLM"
"""Category of vLLM's memory on the same device, in addition to PyTorch's categories."""
AT_REST = "training at rest"
"""Category of all that a training holds of the device while vLLM gets its weights or generates, the context apart."""
BESIDE_TENSORS = ("context", "process", "rounding", "fragmentation")
"""Parts of a breakdown that are no bytes of tensors."""


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
    further one stand for all; what comes before the steps and after them is included, since it may hold the most.

    Attributes:
        marks: ascending; the first one starts with moment 0.
        levels: bytes at each moment by PyTorch's category, and :data:`VLLM`; each as long as there are moments.
        peak: index of the moment at which tensors hold the most.
        breakdown: what the need consists of at that moment, the allocator's part and the context included
            (``MemoryEstimate.breakdown``).
        error: share by which the need may be off.
        followed: whether memory was followed from moment to moment; else each stretch has its peak alone.
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
        """Bytes at each moment, all categories together."""
        return tuple(map(sum, zip(*self.levels.values(), strict=True)))

    @property
    def need_bytes(self) -> int:
        """Device memory that is needed, context included."""
        return sum(self.breakdown.values())

    def at(self, moment: int) -> dict[str, int]:
        """Return the bytes at a moment, by category, without the empty ones."""
        return {name: sizes[moment] for name, sizes in self.levels.items() if sizes[moment]}

    def stretch(self, place: int) -> range:
        """Return the moments of the mark with that index."""
        ends = [*(mark.start for mark in self.marks[1:]), self.moments]
        return range(self.marks[place].start, ends[place])

    def thinned(self) -> MemoryTimeline:
        """Return the same with about :data:`MOST_MOMENTS`: of neighbouring ones the highest, so that no peak is lost.

        Stretches are thinned in proportion to their moments; short ones keep all of theirs.
        """
        if self.moments <= MOST_MOMENTS:
            return self
        totals, kept, marks = self.totals, list[int](), list[Mark]()
        for place, mark in enumerate(self.marks):
            moments = self.stretch(place)
            count = min(len(moments), max(_FEWEST_IN_A_STRETCH, MOST_MOMENTS * len(moments) // self.moments))
            marks.append(replace(mark, start=len(kept)))
            for group in _groups(moments, count):
                kept.append(self.peak if self.peak in group else max(group, key=totals.__getitem__))
        levels = {name: tuple([sizes[moment] for moment in kept]) for name, sizes in self.levels.items()}
        return replace(self, marks=tuple(marks), levels=levels, peak=kept.index(self.peak))


def _groups(moments: Sequence[int], count: int) -> list[Sequence[int]]:
    """Return so many groups of neighbouring moments, about equal in size."""
    ends = [len(moments) * place // count for place in range(count + 1)] if count else [0]
    return [moments[first:end] for first, end in pairwise(ends)]
