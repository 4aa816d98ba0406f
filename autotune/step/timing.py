"""When to stop timing, and what the timed steps say: rates and how well they are known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.core.measurement import Schedule

# Standard error of the median over that of the mean, for a normal distribution and many values: sqrt(pi / 2).
_MEDIAN_OVER_MEAN = math.sqrt(math.pi / 2)


@dataclass(frozen=True)
class Timing:
    """What timed steps say.

    Attributes:
        steps: how many there were.
        step_seconds: their median.
        step_seconds_error: its relative standard error, or None for a single step.
        tokens_per_second: all tokens over all seconds.
        tokens_per_second_error: its relative standard error, or None for a single step.
    """

    steps: int
    step_seconds: float
    step_seconds_error: float | None
    tokens_per_second: float
    tokens_per_second_error: float | None


def timing(seconds: Sequence[float], tokens: Sequence[int]) -> Timing:
    """Return what steps of so many ``seconds`` and ``tokens`` each say. Not empty.

    The token rate is a ratio of sums; its standard error is the one of ratio estimation (Cochran, Sampling Techniques,
    3rd edition, section 2.11), in which long steps with many tokens are no noise.
    """
    count = len(seconds)
    mean_seconds = sum(seconds) / count
    rate = sum(tokens) / sum(seconds)
    median = statistics.median(seconds)
    if count < 2:
        return Timing(count, median, None, rate, None)
    median_error = _MEDIAN_OVER_MEAN * statistics.stdev(seconds) / math.sqrt(count)
    residuals = sum((step_tokens - rate * took) ** 2 for step_tokens, took in zip(tokens, seconds, strict=True))
    rate_error = math.sqrt(residuals / (count * (count - 1))) / mean_seconds
    return Timing(count, median, median_error / median, rate, rate_error / rate)


def enough(schedule: Schedule, seconds: Sequence[float], tokens: Sequence[int]) -> bool:
    """Whether the timed steps satisfy the schedule."""
    if len(seconds) < max(schedule.min_steps, 1):
        return False
    if len(seconds) >= schedule.max_steps or sum(seconds) >= schedule.max_seconds:
        return True
    known = timing(seconds, tokens)
    errors = (known.step_seconds_error, known.tokens_per_second_error)
    return all(error is not None and error <= schedule.target_error for error in errors)
