"""Says how the speeds of a recommendation and of its baseline compare, so that all that words it says the same."""

from __future__ import annotations

from enum import StrEnum

from autotune.core.result import Choosable, Result


class Speeds(StrEnum):
    """What a run showed of the recommendation's speed beside the baseline's.

    Attributes:
        OWN: the baseline is what is recommended.
        UNKNOWN: one of the two was not measured.
        EQUAL: both show the same to two digits, and nothing shows the spread between runs.
        NOT_TOLD_APART: either may be the faster one.
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
    elif f"{speedup:.2f}" == "1.00":
        return Speeds.EQUAL
    return Speeds.FASTER if speedup > 1 else Speeds.SLOWER
