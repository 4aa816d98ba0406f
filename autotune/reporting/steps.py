"""The memory of one optimizer step as values: its stretches with their names, and the parts of the need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autotune.core.memory_timeline import BESIDE_TENSORS, VLLM, Mark, MemoryTimeline
from autotune.core.program import CONSTRUCTION
from autotune.core.timeline import Occurrence, Part

PARTS = (
    *BESIDE_TENSORS, "parameter", "optimizer state", "gradient", "activation", "temporary", "other", "training at rest",
    VLLM,
)  # fmt: skip
"""The parts of the need, from the bottom of a stack to its top."""
_MERGED = {"buffer": "other"}


@dataclass(frozen=True)
class Step:
    """The memory of a candidate through one step.

    Attributes:
        role: ``recommended`` or ``default``.
        name: of the candidate, in a few words.
        measured: measurements of probes, in a sentence; empty without any.
    """

    role: str
    name: str
    timeline: MemoryTimeline
    measured: str = ""


@dataclass(frozen=True)
class Stretch:
    """A part of a step, or its forward or backward pass.

    Attributes:
        moments: of the timeline.
        most_bytes: peak memory of tensors, and of vLLM, in it.
    """

    name: str
    moments: range
    most_bytes: int


def stretches(timeline: MemoryTimeline) -> tuple[Stretch, ...]:
    """Return the stretches of a step in their order."""
    totals, passes = timeline.totals, {(mark.part, mark.backward) for mark in timeline.marks}
    return tuple(
        Stretch(
            _named(mark, timeline.micro_batches, both=(mark.part, not mark.backward) in passes),
            moments,
            max((totals[moment] for moment in moments), default=0),
        )
        for place, mark in enumerate(timeline.marks)
        for moments in (timeline.stretch(place),)
    )


def _named(mark: Mark, micro_batches: int, *, both: bool) -> str:
    """Return the name of a stretch; a part of a micro-batch includes which micro-batch."""
    part = mark.part
    # Construction and the first step, which makes the optimizer's state; a longer name has no room below a chart.
    words = "before the step" if part == Part(CONSTRUCTION, Occurrence.BEFORE) else part.phase
    if part.of_micro_batch and micro_batches > 1:
        further = "2" if micro_batches == 2 else f"2 to {micro_batches}"
        words += " 1" if part.occurrence is Occurrence.FIRST else f" {further}"
    return f"{words}, {'backward' if mark.backward else 'forward'}" if both else words


def shown_parts(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by part in the order of :data:`PARTS`, small kinds under ``other``; none that are 0."""
    found = dict.fromkeys(PARTS, 0)
    for name, size in sizes.items():
        known = _MERGED.get(name, name)
        found[known if known in found else "other"] += size
    return {name: size for name, size in found.items() if size}


def shown_levels(timeline: MemoryTimeline) -> dict[str, tuple[int, ...]]:
    """Return the bytes at each moment by part; parts outside tensors are constant, as at the peak."""
    at_each = [shown_parts(timeline.at(moment)) for moment in range(timeline.moments)]
    fixed = {name: timeline.breakdown[name] for name in BESIDE_TENSORS if timeline.breakdown.get(name)}
    known = {name for parts in at_each for name in parts}
    return {
        name: (fixed[name],) * timeline.moments if name in fixed else tuple([parts.get(name, 0) for parts in at_each])
        for name in PARTS
        if name in fixed or name in known
    }


def untraced_text(names: Iterable[str], *, predicted: bool) -> str:
    """Return why the memory of a step is not shown of those with these names; an empty text where there are none."""
    missing = " and ".join(names)
    if not missing:
        return ""
    why = "its step was not traced" if predicted else "predictions were turned off, and with them traces"
    return f"The memory of a step of {missing} over time is not known: {why}."
