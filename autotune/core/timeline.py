"""The course of memory through one traced optimizer step, part by part, in a form that can be scaled to other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autotune.core.step_time import StepTime


class Occurrence(StrEnum):
    """Which occurrence of a phase a part of a run is. Gradients are held from the second micro-batch on."""

    BEFORE = "before the steps"
    ONCE = "once in a step"
    FIRST = "first of a step"
    FURTHER = "further one of a step"
    AFTER = "between steps or after them"


@dataclass(frozen=True)
class Part:
    """A part of a run: a phase of the step program, and which of its occurrences."""

    phase: str
    occurrence: Occurrence

    @property
    def of_micro_batch(self) -> bool:
        """Whether it is a part of each micro-batch."""
        return self.occurrence in (Occurrence.FIRST, Occurrence.FURTHER)


@dataclass(frozen=True)
class Section:
    """Memory in one part of a run at each of its moments, which are the points right before memory is freed.

    Attributes:
        moments: name of the operator that allocated last before each moment, with the shape of its result, in order.
        levels: by PyTorch's category, the bytes on the device at each moment; each as long as ``moments``.
        host_bytes: peak bytes on the host.
        time: time of this part, or None if the speed of the device is not known.
        backward: index of the first moment in the backward pass; the number of moments if there is none.
        machine_bytes: peak bytes on the host of all ranks in one machine together, the first rank among them.
        operators: number of runs of each operator of the trace, by its index there; empty unless requested.
    """

    part: Part
    moments: tuple[str, ...]
    levels: Mapping[str, tuple[int, ...]]
    host_bytes: int = 0
    time: StepTime | None = None
    backward: int = 0
    machine_bytes: int = 0
    operators: Mapping[int, int] = field(default_factory=dict)

    @property
    def totals(self) -> tuple[int, ...]:
        """Bytes on the device at each moment, all categories together."""
        return tuple(map(sum, zip(*self.levels.values(), strict=True))) if self.levels else (0,) * len(self.moments)
