"""A search under many clocks ends with a result, and stays within its limit of probes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from autotune.core.candidate import Candidate
from autotune.core.events import ProbeStarted
from autotune.core.measurement import Measurement
from autotune.core.status import Ending, ProbeStatus
from autotune.study.durations import Clock
from autotune.study.problem import ProbeRun, Purpose
from tests.study.foretold import Foretold
from tests.study.replayed import BASELINE, ReplayedTable, measurement
from tests.study.running import Now, Run, probed

TRIALS = 6
UNCOUNTED = (Purpose.CONFIRMATION, Purpose.COMPARISON)
LIMIT_SECONDS = 100.0
_MOST_RUNS = 100
"""Far more than a search of so few trials takes; one that spins never ends."""
RAN_OUT = Measurement(ProbeStatus.OUT_OF_MEMORY, "in backward", wall_seconds=5.0)


@dataclass
class Timed(ReplayedTable):
    """A replayed table whose probes take as long as the test sets, or until they are killed."""

    now: Now = field(default_factory=Now)
    drawn: random.Random = field(default_factory=lambda: random.Random(0))
    longest_seconds: float = 40.0
    always_seconds: float | None = None

    def __call__(self, run: ProbeRun, seconds_left: float | None) -> Measurement:
        """Answer a probe."""
        shown = super().__call__(run, seconds_left)
        assert len(self.runs) <= _MOST_RUNS
        seconds = self.always_seconds or self.drawn.choice([0.1, 1.0, self.drawn.uniform(0, self.longest_seconds)])
        if seconds_left is not None and seconds >= seconds_left:
            # A little later, as the end of a process is: not before the limit by a rounding error.
            self.now.seconds += seconds_left + 1e-6
            return Measurement(ProbeStatus.TIMEOUT, f"killed after {seconds_left} s", wall_seconds=seconds_left)
        self.now.seconds += seconds
        steps = self.drawn.uniform(0, seconds / 4)
        return replace(
            shown, wall_seconds=seconds, step_seconds=steps, micro_batch_seconds=steps, micro_batches_timed=1
        )


def counted(run: Run) -> list[ProbeStarted]:
    return [event for event in run.events if isinstance(event, ProbeStarted) and event.purpose not in UNCOUNTED]


@pytest.mark.parametrize("told", [False, True], ids=["told nothing", "told"])
@pytest.mark.parametrize("first", [0, pytest.param(12, marks=pytest.mark.nightly)])
def test_under_any_clock_a_search_ends_with_a_result_and_keeps_to_its_trials(now: Now, first: int, told: bool) -> None:
    for seed in range(first, first + 12):
        drawn = random.Random(seed)
        now.step_seconds = drawn.choice([0.0, 0.0, 0.01, 0.5])
        limit = drawn.choice([0.0, 0.1, 10.0, LIMIT_SECONDS, 200.0])
        run, table = Run("sqlite://"), Timed(now=now, drawn=drawn, longest_seconds=drawn.choice([5.0, 40.0, 500.0]))
        table.limit_bytes = drawn.choice([600, 600, 300, 0])
        predictor = Foretold(is_traced=lambda _: False) if told else None
        outcome = run(table, trials=TRIALS, seed=seed, timeout_seconds=limit, predictor=predictor)
        assert len(counted(run)) <= TRIALS
        probes = Counter(event.candidate for event in counted(run))
        assert set(probes.values()) <= {1}
        assert outcome.ending is not None
        if limit >= 10.0 and table.limit_bytes == 600 and len(probed(outcome)) > 1:
            assert outcome.winner is not None or not any(record.measurement.ok for record in outcome.records)


def test_what_the_time_limit_ended_is_not_repeated_and_counts_as_a_trial(now: Now) -> None:
    class Slower(Timed):
        def __call__(self, run: ProbeRun, seconds_left: float | None) -> Measurement:
            self.always_seconds = 10.0 if run.candidate == BASELINE else 60.0
            return super().__call__(run, seconds_left)

    run, table = Run("sqlite://"), Slower(now=now)
    outcome = run(table, trials=24, timeout_seconds=LIMIT_SECONDS)
    assert [event.purpose for event in counted(run)] == [Purpose.BASELINE, Purpose.SEARCH]
    assert [record.measurement.status for record in outcome.records] == [ProbeStatus.OK, ProbeStatus.TIMEOUT]
    assert outcome.winner == outcome.baseline is not None
    assert outcome.ending is Ending.TIME


def test_where_time_is_short_a_second_candidate_comes_before_the_confirmation_of_the_only_one(now: Now) -> None:
    run, table = Run("sqlite://"), Timed(now=now, always_seconds=30.0)
    run(table, timeout_seconds=LIMIT_SECONDS, predictor=Foretold())
    assert [item.purpose for item in table.runs[:3]] == [Purpose.BASELINE, Purpose.SEARCH, Purpose.CONFIRMATION]


def test_time_is_kept_for_the_smallest_predicted_need_while_nothing_fits(now: Now) -> None:
    def crashed(item: Candidate) -> Measurement:
        return Measurement(ProbeStatus.CRASHED, "signal 9") if item != BASELINE else RAN_OUT

    predictor = Foretold(need=lambda item: 601 if item == BASELINE else measurement(item).peak_bytes or 600)
    run, table = Run("sqlite://"), Timed(now=now, always_seconds=30.0)
    table.shown.update({item: crashed(item) for item in run.problem.everything()})
    outcome = run(table, timeout_seconds=LIMIT_SECONDS, predictor=predictor)
    assert [record.candidate for record in probed(outcome)][-1] == predictor.least()
    assert outcome.smallest is not None
    assert outcome.smallest.number is not None


def test_nothing_is_traced_once_the_time_limit_has_passed(now: Now) -> None:
    class Slow(Foretold):
        def least(self, goes_on: Callable[[], bool] = lambda: True) -> Candidate | None:
            if not goes_on():
                return None
            began.append(now.seconds)
            now.seconds += 30.0
            return super().least()

    began: list[float] = []
    run, table = Run("sqlite://"), Timed(now=now, always_seconds=2 * LIMIT_SECONDS)
    outcome = run(table, timeout_seconds=LIMIT_SECONDS, predictor=Slow())
    assert outcome.ending is Ending.TIME
    assert outcome.smallest is None
    assert all(seconds < LIMIT_SECONDS for seconds in began)


def test_a_clock_counts_down_to_zero_less_a_reserve(now: Now) -> None:
    limited, unlimited = Clock(90.0), Clock(None)
    now.seconds += 30
    assert (limited.left(), limited.left(20.0), unlimited.left()) == (60.0, 40.0, None)
    now.seconds += 70
    assert (limited.left(), limited.over(), unlimited.over()) == (0.0, True, False)
