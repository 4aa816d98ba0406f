"""Statistics of repeated runs: the mean rate, its prediction interval, and the mean ratio of pairs of runs.

Rates of runs differ by factors, so everything is computed on logarithms: means are geometric, and intervals are
symmetric in ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, fmean, variance

CONFIDENCE = 0.95
"""Probability of every interval here."""
TIE = 0.02
"""Token rates within this share of each other count as equal: a probe measures its rate to a few percent at best."""

_LATER = 0.03
"""Standard deviation of the logarithm of a later run's rate that runs within minutes do not show, such as by the
machine's temperature and neighbours. Fitted on CPUs: 43 of the 49 rates of ``benchmarks/probe/soak.md`` are within
ranges without it, and 46 with it."""


@dataclass(frozen=True)
class Interval:
    """From ``low`` to ``high``, both included, in the unit of the values."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        """Whether a value lies in it."""
        return self.low <= value <= self.high


def mean_rate(rates: Sequence[float]) -> float:
    """Return the geometric mean of rates, all above 0; at least one."""
    # Divided by the first rate, so that the mean of equal rates is exact.
    return rates[0] * math.exp(fmean(math.log(rate / rates[0]) for rate in rates))


def prediction_interval(rates: Sequence[float], in_turn: Sequence[float] = ()) -> Interval | None:
    """Return the prediction interval of one further run; None for fewer than two runs.

    On logarithms, for a normal distribution of unknown mean and variance: mean ± t(n - 1) s sqrt(1 + 1/n) (Hahn and
    Meeker, Statistical Intervals, 1991, section 4.7). With the runs of another candidate, s is the larger one of its
    own and the pooled standard deviation, and t has the degrees of freedom of both: a few runs that agree by chance do
    not make a narrow interval on a machine that varies. If the other candidate's runs scatter 0.7 to 3 times as much,
    94 to 99.6 % of further runs are within.

    Args:
        in_turn: rates of another candidate, whose runs alternated with these on the same machine.
    """
    return _interval(rates, math.sqrt(1 + 1 / len(rates)), in_turn) if len(rates) > 1 else None


def for_later_run(soon: Interval) -> Interval:
    """Return the prediction interval of a run at a later time.

    The two have independent causes, so that the squares of their half-widths add up, on logarithms.

    Args:
        soon: that of a run soon after the others, from :func:`prediction_interval`.
    """
    middle, half = math.sqrt(soon.low * soon.high), math.log(soon.high / soon.low) / 2
    width = math.hypot(half, NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * _LATER)
    return Interval(middle * math.exp(-width), middle * math.exp(width))


def mean_interval(ratios: Sequence[float]) -> Interval | None:
    """Return the confidence interval of the mean of ratios; None for fewer than two.

    Student's, on logarithms: mean ± t(n - 1) s / sqrt(n).
    """
    return _interval(ratios, math.sqrt(1 / len(ratios))) if len(ratios) > 1 else None


@cache
def student_t(degrees: int) -> float:
    """Return the t for which a Student-distributed value lies between -t and t with probability :data:`CONFIDENCE`.

    By bisection of :func:`_probability_within`.
    """
    low, high = 0.0, 1.0
    while _probability_within(high, degrees) < CONFIDENCE:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _probability_within(middle, degrees) < CONFIDENCE else (low, middle)
    return high


def _probability_within(t: float, degrees: int) -> float:
    """Return the probability that a Student-distributed value lies between -t and t.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 (odd degrees) and 26.7.4 (even ones).
    """
    angle = math.atan2(t, math.sqrt(degrees))
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for power in range(2 + odd, degrees + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power - 1) / power
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def _interval(values: Sequence[float], deviations: float, in_turn: Sequence[float] = ()) -> Interval:
    samples = [[math.log(value) for value in sample] for sample in (values, in_turn) if len(sample) > 1]
    degrees = sum(len(sample) - 1 for sample in samples)
    pooled = sum((len(sample) - 1) * variance(sample) for sample in samples) / degrees
    mean, spread = fmean(samples[0]), math.sqrt(max(pooled, variance(samples[0])))
    width = student_t(degrees) * spread * deviations
    return Interval(math.exp(mean - width), math.exp(mean + width))
