"""Corrections of estimates by what probes of the same workload measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

FEWEST = 2
"""Probes that it takes to correct anything: one cannot be told from chance."""

ENOUGH = 5
"""Probes that it takes to state a smaller error than before: the largest of a few misses says little about the next."""

SMALLEST_ERROR = 0.05
"""Share below which no error is stated, however well the probes agree."""


@dataclass(frozen=True)
class Pair:
    """One figure as it was predicted and as it was measured, in the same unit; both are above 0."""

    predicted: float
    measured: float


@dataclass(frozen=True)
class Correction:
    """What estimates are corrected by: a factor, or something to add.

    Attributes:
        error: share by which what was corrected may be off.
        probes: how many it stands on; 0 where nothing is corrected.
    """

    factor: float = 1.0
    offset: float = 0.0
    error: float = 0.0
    probes: int = 0

    def __call__(self, predicted: float) -> float:
        """Return a figure as corrected."""
        return max(0.0, self.factor * predicted + self.offset)


def correction(pairs: Sequence[Pair], stated_error: float) -> Correction:
    """Return the median factor or the median difference, whichever leaves the smaller misses.

    Medians, because one probe that shared its device with something else must not move all estimates.

    Args:
        stated_error: share that estimates may be off by without correction.
    """
    if len(pairs) < FEWEST:
        return Correction(error=stated_error)
    found = (
        Correction(offset=median(pair.measured - pair.predicted for pair in pairs)),
        Correction(factor=median(pair.measured / pair.predicted for pair in pairs)),
    )
    best = min(found, key=lambda item: (median(_misses(item, pairs)), max(_misses(item, pairs))))
    floor = SMALLEST_ERROR if len(pairs) >= ENOUGH else max(SMALLEST_ERROR, stated_error)
    return Correction(best.factor, best.offset, max(floor, *_misses(best, pairs)), len(pairs))


def factor(pairs: Sequence[Pair]) -> Correction:
    """Return the median factor, for figures that order candidates and of which no error is stated."""
    if len(pairs) < FEWEST:
        return Correction()
    return Correction(factor=median(pair.measured / pair.predicted for pair in pairs), probes=len(pairs))


def _misses(found: Correction, pairs: Sequence[Pair]) -> list[float]:
    """Return by what share of what was predicted each probe differs from it."""
    return [abs(pair.measured / max(1.0, found(pair.predicted)) - 1) for pair in pairs]
