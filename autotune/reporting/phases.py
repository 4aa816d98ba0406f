"""The phases of an optimizer step as figures to compare: the memory and the time that each takes."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.program import CONSTRUCTION, MICRO_BATCH, OPTIMIZER_STEP, SAVE
from autotune.core.result import Choosable

_USUAL = frozenset({CONSTRUCTION, MICRO_BATCH, OPTIMIZER_STEP, SAVE})


@dataclass(frozen=True)
class PhaseRow:
    """One phase of the recommended training.

    Attributes:
        peak_bytes: the most bytes that the device held in it; None if it is no phase of its own.
        seconds: its part of a mean optimizer step; None if it was not timed apart.
        peak_share: of the largest peak, 0 to 1.
        time_share: of an optimizer step, 0 to 1.
    """

    name: str
    peak_bytes: int | None
    seconds: float | None
    peak_share: float | None
    time_share: float | None


def phase_rows(chosen: Choosable) -> tuple[PhaseRow, ...]:
    """Return the phases of a training in their order; none if it has only those that every training has."""
    names = tuple(dict.fromkeys((*chosen.peaks, *chosen.seconds)))
    if set(names) <= _USUAL:
        return ()
    highest, step = max(chosen.peaks.values(), default=0), sum(chosen.seconds.values())
    return tuple(
        PhaseRow(
            name=name,
            peak_bytes=chosen.peaks.get(name),
            seconds=chosen.seconds.get(name),
            peak_share=chosen.peaks[name] / highest if name in chosen.peaks and highest else None,
            time_share=chosen.seconds[name] / step if name in chosen.seconds and step else None,
        )
        for name in names
    )
