"""Finds, for candidates that do not fit, the smallest change that makes them fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotune.core.estimate import Change, Estimate


def smallest_changes(asked: Iterable[Estimate], estimates: Sequence[Estimate]) -> tuple[Change, ...]:
    """Return, for each asked candidate that does not fit, the nearest candidate that fits.

    Args:
        estimates: all estimates, the fastest first, so that of equally near candidates the fastest is taken.
    """
    fitting = [estimate for estimate in estimates if estimate.fits]
    if not fitting:
        return ()
    missing = dict.fromkeys(estimate.candidate for estimate in asked if not estimate.fits)
    return tuple(
        Change(candidate, min(fitting, key=lambda other: len(other.candidate.differences(candidate))))
        for candidate in missing
    )
