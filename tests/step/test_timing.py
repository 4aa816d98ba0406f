"""How well a rate is known, checked against what resampling says."""

from __future__ import annotations

import random
import statistics

import pytest

from autotune.core.measurement import Schedule
from autotune.step.timing import enough, timing


def test_the_rate_is_all_tokens_over_all_seconds() -> None:
    known = timing([1.0, 3.0], [100, 500])
    assert known.tokens_per_second == 150.0
    assert known.step_seconds == 2.0
    assert known.steps == 2


def test_steps_in_proportion_to_their_tokens_leave_no_doubt_about_the_rate() -> None:
    known = timing([1.0, 2.0, 3.0], [10, 20, 30])
    assert known.tokens_per_second_error == pytest.approx(0.0)
    assert known.step_seconds_error is not None
    assert known.step_seconds_error > 0.1


def test_one_step_says_nothing_of_its_error() -> None:
    assert timing([1.0], [10]).tokens_per_second_error is None


def test_errors_are_those_that_repetition_shows() -> None:
    source = random.Random(3)
    rates, medians, rate_errors, median_errors = [], [], [], []
    for _ in range(2000):
        tokens = [source.randint(50, 150) for _ in range(25)]
        seconds = [count / 100 * source.gauss(1.0, 0.1) for count in tokens]
        known = timing(seconds, tokens)
        assert known.tokens_per_second_error is not None
        assert known.step_seconds_error is not None
        rates.append(known.tokens_per_second)
        medians.append(known.step_seconds)
        rate_errors.append(known.tokens_per_second_error)
        median_errors.append(known.step_seconds_error)
    spread = statistics.stdev(rates) / statistics.mean(rates)
    assert statistics.mean(rate_errors) == pytest.approx(spread, rel=0.1)
    # These lengths are uniform, not normal: their median is known less well than the formula says, by about a third.
    spread = statistics.stdev(medians) / statistics.mean(medians)
    assert statistics.mean(median_errors) == pytest.approx(spread, rel=0.4)


@pytest.mark.parametrize(
    ("seconds", "schedule", "stops"),
    [
        ([1.0] * 2, Schedule(min_steps=3), False),
        ([1.0] * 3, Schedule(min_steps=3), True),
        ([1.0, 2.0, 1.0], Schedule(min_steps=3, target_error=0.01), False),
        ([1.0, 2.0, 1.0], Schedule(min_steps=3, target_error=0.01, max_seconds=4.0), True),
        ([1.0, 2.0, 1.0], Schedule(min_steps=3, target_error=0.01, max_steps=3), True),
        ([1.0], Schedule(min_steps=1), False),
        ([100.0], Schedule(min_steps=2, max_seconds=10.0), False),
    ],
)
def test_timing_stops_when_it_knows_enough_or_may_not_go_on(
    seconds: list[float], schedule: Schedule, stops: bool
) -> None:
    assert enough(schedule, seconds, [100] * len(seconds)) is stops
