"""Classifies the speed comparison of a recommendation with its baseline once for every report."""

from __future__ import annotations

from enum import StrEnum

from autotune.core.result import Choosable, Result


class Speeds(StrEnum):
    """What a run showed of the recommendation's speed beside the baseline's.

    Attributes:
        OWN: the baseline is what is recommended.
        UNKNOWN: one of the two was not measured.
        EQUAL: both show the same to two digits, and nothing shows the spread between runs.
        NOT_TOLD_APART: either may be the faster one: the interval of the ratio includes 1, or, without an interval, the
            range of a further run of the recommendation includes the baseline's rate.
        FASTER, SLOWER: the recommendation is; slower than a baseline that may not be recommended.
    """

    OWN = "own"
    UNKNOWN = "unknown"
    EQUAL = "equal"
    NOT_TOLD_APART = "not told apart"
    FASTER = "faster"
    SLOWER = "slower"


def compared(result: Result, recommended: Choosable) -> Speeds:
    """Return how the recommendation of a result compares with its baseline."""
    speedup, low, high = result.speedup, result.speedup_low, result.speedup_high
    if result.baseline is not None and recommended.candidate == result.baseline.candidate:
        return Speeds.OWN
    if speedup is None:
        return Speeds.UNKNOWN
    if low is not None and high is not None:
        if low <= 1 <= high:
            return Speeds.NOT_TOLD_APART
    elif _in_range(result.baseline, recommended):
        return Speeds.NOT_TOLD_APART
    elif f"{speedup:.2f}" == "1.00":
        return Speeds.EQUAL
    return Speeds.FASTER if speedup > 1 else Speeds.SLOWER


def _in_range(baseline: Choosable | None, recommended: Choosable) -> bool:
    """Return whether a further run of the recommendation may be as fast as the baseline was."""
    rate = baseline.tokens_per_second if baseline is not None else None
    low, high = recommended.tokens_per_second_low, recommended.tokens_per_second_high
    return rate is not None and low is not None and high is not None and low <= rate <= high
