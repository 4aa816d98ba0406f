"""Memory and time of each part of one traced optimizer step, from which larger models are extrapolated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from autotune.core.step_time import StepTime


class Occurrence(StrEnum):
    """The occurrence of a phase in a run; from the second micro-batch on, gradients are allocated."""

    BEFORE = "before the steps"
    ONCE = "once in a step"
    FIRST = "first of a step"
    FURTHER = "further one of a step"
    AFTER = "between steps or after them"


@dataclass(frozen=True)
class Part:
    """A part of a run: an occurrence of a phase of the step program."""

    phase: str
    occurrence: Occurrence

    @property
    def of_micro_batch(self) -> bool:
        """Whether it is a part of each micro-batch."""
        return self.occurrence in (Occurrence.FIRST, Occurrence.FURTHER)


@dataclass(frozen=True)
class Section:
    """Memory and time of one part of a run; its moments are the points right before memory is freed.

    Attributes:
        moments: for each moment, the last operator before it that allocated, with the shape of its result.
        levels: by PyTorch's category, the bytes on the device at each moment.
        host_bytes: peak bytes on the host.
        time: time of this part, or None if the speed of the device is not known.
        backward: index of the first moment of the backward pass, or the number of moments.
        machine_bytes: peak bytes on the host of all ranks in the first rank's machine together.
        operators: number of runs of each operator, by its index in the trace; empty unless requested.
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
        """Bytes on the device at each moment, summed over all categories."""
        return tuple(map(sum, zip(*self.levels.values(), strict=True))) if self.levels else (0,) * len(self.moments)
