"""Corrects estimates by what probes of the same workload measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median

FEWEST = 2
"""Fewest probes from which a correction is computed: a single one may be off by chance."""

ENOUGH = 5
"""Fewest probes from which a smaller error than before is stated: the largest of a few misses says little about the
next one."""

SMALLEST_ERROR = 0.05
"""The smallest error that is stated, as a share, however well the probes agree."""


@dataclass(frozen=True)
class Pair:
    """A predicted figure and its measured value, in the same unit; both are above 0."""

    predicted: float
    measured: float


@dataclass(frozen=True)
class Correction:
    """A correction of estimates: a factor or an offset, and what everything is raised by after it.

    Example: if probes measured 11 GiB where 10 GiB were predicted, and 22 GiB where 20 GiB were, the factor is 1.1.

    Attributes:
        error: share by which a corrected figure may be off, the raise apart.
        probes: number of probes that factor or offset is derived from; 0 where there were too few.
        raised: factor by which figures were raised since candidates ran out of memory; 1 where none did.
    """

    factor: float = 1.0
    offset: float = 0.0
    error: float = 0.0
    probes: int = 0
    raised: float = 1.0

    def __call__(self, predicted: float) -> float:
        """Return the corrected figure."""
        return max(0.0, self.factor * predicted + self.offset) * self.raised

    def error_after(self, error: float) -> float:
        """Return the error of a figure that was off by up to ``error`` before the raise.

        It grows by as much as the figure does, so that nothing is ruled out by the raise.
        """
        before = min(1.0, error)
        return before + (1 - before) * (1 - 1 / self.raised)


def correction(pairs: Sequence[Pair], stated_error: float) -> Correction:
    """Return the median factor or the median difference, whichever leaves the smaller misses.

    Medians are used because one probe that shared its device with another process must not move all estimates.

    Args:
        stated_error: share by which estimates may be off without a correction.
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


def raised(found: Correction, ran_out: Sequence[float], fitted: Sequence[float], limit: float) -> Correction:
    """Return a correction that is raised until all that ran out of memory needs the limit at least, or until one of
    those that fitted would.

    What is predicted to need less than each that ran out stays below the limit.

    Args:
        ran_out, fitted: predicted figures, not corrected.
    """
    wanted = max((limit / found(predicted) for predicted in ran_out if found(predicted)), default=1.0)
    allowed = min((limit / found(predicted) for predicted in fitted if found(predicted)), default=inf)
    return replace(found, raised=max(1.0, min(wanted, allowed)))


def factor(pairs: Sequence[Pair]) -> Correction:
    """Return the median factor, for figures that only rank candidates and need no stated error."""
    if len(pairs) < FEWEST:
        return Correction()
    return Correction(factor=median(pair.measured / pair.predicted for pair in pairs), probes=len(pairs))


def _misses(found: Correction, pairs: Sequence[Pair]) -> list[float]:
    """Return each probe's relative difference from its corrected prediction."""
    return [abs(pair.measured / max(1.0, found(pair.predicted)) - 1) for pair in pairs]
