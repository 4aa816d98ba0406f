"""The course of memory through one traced optimizer step, part by part, in a form that can be scaled to other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from autotune.core.step_time import StepTime


class Part(StrEnum):
    """A part of a run. Gradients are held already in the further micro-batches of an optimizer step."""

    BEFORE = "before"
    FIRST_MICRO_BATCH = "first micro-batch"
    FURTHER_MICRO_BATCH = "further micro-batch"
    OPTIMIZER = "optimizer"


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
