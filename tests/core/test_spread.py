"""Statistics of repeated runs, compared with published tables and with random samples."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from autotune.core.spread import Interval, for_later_run, mean_interval, mean_rate, prediction_interval, student_t


@pytest.mark.parametrize(
    ("degrees", "published"),
    # Abramowitz and Stegun, table 26.10, P = 0.95.
    [
        (1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (6, 2.447), (7, 2.365), (8, 2.306), (9, 2.262),
        (10, 2.228), (15, 2.131), (29, 2.045), (30, 2.042), (120, 1.980),
    ],
)  # fmt: skip
def test_students_t_is_the_published_one(degrees: int, published: float) -> None:
    assert student_t(degrees) == pytest.approx(published, abs=5e-4)


def test_the_mean_of_factors_is_geometric() -> None:
    assert mean_rate([50.0, 200.0]) == pytest.approx(100.0)


def test_one_run_shows_no_spread() -> None:
    assert prediction_interval([100.0]) is mean_interval([1.1]) is None
    assert prediction_interval([]) is mean_interval([]) is None


def test_equal_runs_leave_no_room() -> None:
    found = prediction_interval([100.0, 100.0, 100.0])
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(100.0), pytest.approx(100.0))


def test_an_interval_holds_both_its_ends() -> None:
    assert 1.0 in Interval(1.0, 2.0)
    assert 2.0 in Interval(1.0, 2.0)
    assert 2.1 not in Interval(1.0, 2.0)


def covered(
    interval: Callable[[list[float]], Interval | None], further: Callable[[random.Random], float], spread: float = 0.1
) -> float:
    """Return how often the interval from five runs, with the standard deviation ``spread``, holds something."""
    chance = random.Random(0)
    found = [(interval([chance.lognormvariate(7, spread) for _ in range(5)]), further(chance)) for _ in range(4000)]
    return sum(value in between for between, value in found if between is not None) / len(found)


def test_a_further_run_lies_within_in_95_of_100_cases() -> None:
    assert covered(prediction_interval, lambda chance: chance.lognormvariate(7, 0.1)) == pytest.approx(0.95, abs=0.01)


def test_a_run_at_a_later_time_lies_within_in_at_least_95_of_100_cases_if_the_machine_varies() -> None:
    def machine_and_run(chance: random.Random) -> float:
        return chance.lognormvariate(7, math.hypot(0.02, 0.03))

    def promised(runs: list[float]) -> Interval | None:
        soon = prediction_interval(runs)
        return for_later_run(soon) if soon is not None else None

    assert covered(prediction_interval, machine_and_run, 0.02) < 0.85
    assert covered(promised, machine_and_run, 0.02) == pytest.approx(0.96, abs=0.01)


def test_runs_that_agree_by_chance_are_held_against_those_that_alternated_with_them() -> None:
    tight, scattered = [100.0, 101.0, 99.0, 100.0, 102.0], [50.0, 60.0, 45.0, 55.0]
    alone, pooled, turned = (
        prediction_interval(tight),
        prediction_interval(tight, scattered),
        prediction_interval(scattered, tight),
    )
    assert alone is not None
    assert pooled is not None
    assert turned is not None
    # s² = (4 · 0.0114² + 3 · 0.1238²) / 7, t(7) = 2.365, on logarithms.
    assert pooled.high / mean_rate(tight) == pytest.approx(math.exp(2.365 * 0.0815 * (1 + 1 / 5) ** 0.5), rel=1e-3)
    assert pooled.high / pooled.low > alone.high / alone.low
    # Its own standard deviation, the larger one.
    assert turned.high / mean_rate(scattered) == pytest.approx(math.exp(2.365 * 0.1238 * (1 + 1 / 4) ** 0.5), rel=1e-3)
    assert prediction_interval(tight, [50.0]) == alone


@pytest.mark.parametrize(("scatter", "share"), [(0.07, 0.94), (0.1, 0.96), (0.3, 0.995)])
def test_both_samples_together_make_an_interval_that_holds_as_often(scatter: float, share: float) -> None:
    other = random.Random(1)

    def pooled(runs: list[float]) -> Interval | None:
        return prediction_interval(runs, [other.lognormvariate(6, scatter) for _ in range(4)])

    assert covered(pooled, lambda chance: chance.lognormvariate(7, 0.1)) == pytest.approx(share, abs=0.01)


def test_the_true_mean_lies_within_in_95_of_100_cases() -> None:
    true_mean = 2.718281828**7
    assert covered(mean_interval, lambda _: true_mean) == pytest.approx(0.95, abs=0.01)
