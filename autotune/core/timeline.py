"""The course of memory through one traced optimizer step, part by part, in a form that can be scaled to other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from autotune.core.step_time import StepTime


class Occurrence(StrEnum):
    """Which of the times that a phase comes a part of a run is. Gradients are held from the second micro-batch on."""

    BEFORE = "before the steps"
    ONCE = "once in a step"
    FIRST = "first of a step"
    FURTHER = "further one of a step"


@dataclass(frozen=True)
class Part:
    """A part of a run: a phase of the step program, and which of its times."""

    phase: str
    occurrence: Occurrence

    @property
    def of_micro_batch(self) -> bool:
        """Whether it comes with each micro-batch."""
        return self.occurrence in (Occurrence.FIRST, Occurrence.FURTHER)


@dataclass(frozen=True)
class Section:
    """Memory in one part of a run, at each of its moments: those after which something was freed.

    Attributes:
        moments: name of the operator that allocated last before each moment, in order.
        levels: by category, in PyTorch's words, the bytes on the device at each moment; all as long as ``moments``.
        host_bytes: the most bytes beside the device.
        time: how long this part takes, or None where the speed of the device is not known.
        backward: index of the first moment in the backward pass; as many as there are moments where there is none.
    """

    part: Part
    moments: tuple[str, ...]
    levels: Mapping[str, tuple[int, ...]]
    host_bytes: int = 0
    time: StepTime | None = None
    backward: int = 0

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes on the device at each moment, all categories together."""
        return tuple(map(sum, zip(*self.levels.values(), strict=True))) if self.levels else (0,) * len(self.moments)
