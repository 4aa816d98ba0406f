"""Puts the moments of the parts of a step together to the memory timeline of a candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotune.core.estimate import MemoryEstimate
from autotune.core.memory_timeline import BESIDE_TENSORS, VLLM, Mark, MemoryTimeline
from autotune.planning.extrapolation.forecast import Stretch
from autotune.planning.extrapolation.series import Levels
from autotune.trainers.prompts import GENERATION


def memory_timeline(
    courses: Mapping[Stretch, Sequence[Levels]],
    training: MemoryEstimate,
    memory: MemoryEstimate,
    *,
    micro_batches: int,
    followed: bool,
    vllm: tuple[int, int] = (0, 0),
) -> MemoryTimeline | None:
    """Return the timeline of a step, thinned; None if there is no moment.

    Args:
        courses: bytes of tensors at the moments of each stretch, in the order of the step.
        training: the estimate that the same figures gave, without vLLM.
        memory: the same with vLLM.
        followed: see :class:`MemoryTimeline`.
        vllm: bytes that vLLM holds while completions are generated, and all the other time.
    """
    moments: list[Levels] = []
    marks: list[Mark] = []
    at_peak = {name: size for name, size in training.breakdown.items() if name not in BESIDE_TENSORS}
    peaks: list[int] = []
    for (part, backward), course in courses.items():
        if course:
            marks.append(Mark(part, backward, len(moments)))
        held = vllm[0] if part.phase == GENERATION else vllm[1]
        for levels in course:
            if levels == at_peak:
                peaks.append(len(moments))
            tensors = _at_most(levels, sum(at_peak.values()))
            moments.append({**tensors, VLLM: held} if held else tensors)
    if not moments:
        return None
    names = list(dict.fromkeys(name for levels in moments for name in levels))
    totals = [sum(levels.values()) for levels in moments]
    highest = totals.index(max(totals))
    return MemoryTimeline(
        marks=tuple(marks),
        levels={name: tuple([levels.get(name, 0) for levels in moments]) for name in names},
        # Of moments that hold equally much, the one that the breakdown is of.
        peak=next((place for place in peaks if totals[place] == totals[highest]), highest),
        breakdown=memory.breakdown,
        error=memory.error,
        followed=followed,
        micro_batches=micro_batches,
    ).thinned()


def _at_most(levels: Levels, most: int) -> Levels:
    """Return the bytes of a moment without the few that rounding by category adds to those of the peak."""
    excess = sum(levels.values()) - most
    if excess <= 0:
        return levels
    largest = max(levels, key=levels.__getitem__)
    return {**levels, largest: levels[largest] - excess}
