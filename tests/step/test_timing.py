"""The time of a whole step from few micro-batches, also if the process is suspended for a while."""

from __future__ import annotations

import os
import random
import signal
import statistics
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from autotune.core.measurement import Schedule
from autotune.step.run.meters import CpuMeter
from autotune.step.run.progress import Progress, count_suspensions
from autotune.step.run.timing import TimedMicroBatch, Timings, WholeStep, estimate_timing, is_enough

UPDATE_SECONDS = 3.0
STEP = WholeStep(micro_batches=10, mean_collated=100.0)


def micro_batch(tokens: int, *, first: bool = False, noise: float = 1.0, saved: float = 0.2) -> TimedMicroBatch:
    """Return one of a machine on which a token takes 0.01 s and each micro-batch 0.5 s more.

    Args:
        saved: seconds that making gradients takes less than adding to them.
    """
    return TimedMicroBatch((0.5 + 0.01 * tokens - saved * first) * noise, tokens, first)


def test_a_step_is_its_micro_batches_and_one_update() -> None:
    timed = [micro_batch(tokens, first=place == 0) for tokens in (60, 100, 180) for place in range(2)]
    known = estimate_timing(Timings(timed, [UPDATE_SECONDS] * 3), STEP)
    assert known.step_seconds == pytest.approx(10 * 1.5 - 0.2 + UPDATE_SECONDS)
    assert known.update_seconds == pytest.approx(UPDATE_SECONDS)
    assert known.micro_batch_seconds == pytest.approx((10 * 1.5 - 0.2) / 10)
    assert known.error == pytest.approx(0.0, abs=1e-9)


def test_a_step_reduces_gradients_once_however_many_micro_batches_it_has() -> None:
    timed = [TimedMicroBatch(0.30 + 0.35 * last, 100, special=last) for _ in range(10) for last in (False, True)]
    known = estimate_timing(Timings(timed, [0.05] * 10), WholeStep(micro_batches=8, mean_collated=100.0, special=-1))
    assert known.step_seconds == pytest.approx(8 * 0.30 + 0.35 + 0.05)


def test_micro_batches_that_happen_to_be_small_do_not_make_a_step_short() -> None:
    known = estimate_timing(Timings([micro_batch(tokens) for tokens in (10, 20, 40, 30)], [UPDATE_SECONDS]), STEP)
    assert known.step_seconds == pytest.approx(10 * 1.5 + UPDATE_SECONDS)


def test_loading_is_no_longer_than_the_micro_batches_that_it_is_a_part_of() -> None:
    # An image in the short rows takes most of their time to read, and the mean micro-batch has longer rows.
    slow, fast = TimedMicroBatch(2.0, 50, False, 1.9), TimedMicroBatch(1.0, 120, False, 0.9)
    known = estimate_timing(Timings([slow, fast] * 4, [UPDATE_SECONDS] * 4), STEP)
    assert known.micro_batch_seconds == pytest.approx(2.0 - 50 / 70)
    assert known.loading_seconds == pytest.approx(10 * known.micro_batch_seconds * (1.9 + 0.9) / (2.0 + 1.0))


@pytest.mark.parametrize("disturbed", [255, 256])
def test_a_disturbed_micro_batch_among_equal_ones_is_no_trend(disturbed: int) -> None:
    # 13 packed rows that are all but full, one of them slow; the mean of all rows is shorter than any of them. A line
    # through their times says -5.3 s and 5.8 s there.
    timed = [TimedMicroBatch(0.02, 255 + 256 - disturbed, False)] * 12 + [TimedMicroBatch(0.5, disturbed, False)]
    known = estimate_timing(Timings(timed, [UPDATE_SECONDS] * 13), WholeStep(micro_batches=1, mean_collated=244.0))
    assert known.micro_batch_seconds == pytest.approx((12 * 0.02 + 0.5) / 13)
    assert known.error is not None
    assert known.error > 0


def test_a_single_micro_batch_says_nothing_of_its_error() -> None:
    known = estimate_timing(Timings([micro_batch(100)], [UPDATE_SECONDS]), STEP)
    assert known.step_seconds == pytest.approx(10 * 1.5 + UPDATE_SECONDS)
    assert known.error is None


@pytest.mark.parametrize("saved", [0.0, 1.0])
def test_errors_are_those_that_repetition_shows(saved: float) -> None:
    source = random.Random(3)
    composed, errors = [], []
    for _ in range(1000):
        timed = [
            micro_batch(source.randint(50, 150), first=place == 0, noise=source.gauss(1.0, 0.1), saved=saved)
            for _ in range(12)
            for place in range(2)
        ]
        known = estimate_timing(Timings(timed, [source.gauss(UPDATE_SECONDS, 0.3) for _ in range(12)]), STEP)
        assert known.error is not None
        composed.append(known.step_seconds)
        errors.append(known.error)
    assert statistics.mean(composed) == pytest.approx(10 * 1.5 - saved + UPDATE_SECONDS, rel=0.01)
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(composed) / statistics.mean(composed), rel=0.1)


@pytest.mark.parametrize(
    ("seconds", "schedule", "stops"),
    [
        ([1.0] * 2, Schedule(min_micro_batches=3), False),
        ([1.0] * 3, Schedule(min_micro_batches=3), True),
        ([1.0] * 3, Schedule(min_micro_batches=3, min_seconds=4.0), False),
        ([1.0, 2.0, 1.0], Schedule(min_micro_batches=3, target_error=0.01), False),
        ([1.0, 2.0, 1.0], Schedule(min_micro_batches=3, target_error=0.01, max_seconds=4.0), True),
        ([1.0, 2.0, 1.0], Schedule(min_micro_batches=3, target_error=0.01, max_micro_batches=3), True),
        ([1.0], Schedule(min_micro_batches=1), False),
        ([100.0], Schedule(min_micro_batches=2, max_seconds=10.0), False),
    ],
)
def test_timing_stops_when_it_knows_enough_or_may_not_go_on(
    seconds: list[float], schedule: Schedule, stops: bool
) -> None:
    timed = [TimedMicroBatch(took, 100, special=True) for took in seconds]
    assert is_enough(schedule, Timings(timed, [0.1] * len(seconds)), WholeStep(1, 100.0)) is stops


@pytest.mark.parametrize(("timed", "passed_seconds", "stops"), [(1, 449.0, False), (1, 450.0, True), (0, 500.0, False)])
def test_timing_ends_with_what_there_is_shortly_before_the_time_limit(
    timed: int, passed_seconds: float, stops: bool
) -> None:
    schedule = Schedule(min_micro_batches=6, latest_seconds=450.0)
    known = [TimedMicroBatch(60.0, 100, special=True)] * timed
    assert (
        is_enough(schedule, Timings(known, [0.1] * timed), WholeStep(1, 100.0), passed_seconds=passed_seconds) is stops
    )


@pytest.mark.parametrize(
    ("seconds", "rate_to_beat", "stops"),
    [
        ([1.0, 1.01, 0.99], 200.0, True),
        ([1.0, 1.01, 0.99], 100.0, False),
        ([1.0, 1.01, 0.99], None, False),
        # 91 tok/s; of three like these, one more may be any rate.
        ([1.0, 2.0, 0.5], 120.0, False),
        # 99 tok/s, give or take 3 %, as far as three show.
        ([1.0, 1.08, 0.95], 130.0, False),
        ([1.0, 1.08, 0.95] * 3, 130.0, True),
        ([1.0, 1.0], 200.0, False),
    ],
    ids=["half as fast", "about as fast", "nothing to beat", "not certain", "near by chance", "near", "too few"],
)
def test_timing_ends_early_once_a_candidate_is_certain_to_be_slower_than_the_one_to_beat(
    seconds: list[float], rate_to_beat: float | None, stops: bool
) -> None:
    schedule = Schedule(min_micro_batches=30, min_seconds=60.0, rate_to_beat=rate_to_beat)
    timed = [TimedMicroBatch(took, 100, special=True) for took in seconds]
    step = WholeStep(1, 100.0, tokens=110.0)
    assert is_enough(schedule, Timings(timed, [0.1] * len(seconds)), step) is stops


STEPS = 5


@pytest.fixture
def continued() -> Iterator[None]:
    """The handler of SIGCONT is as it was afterwards."""
    before = signal.getsignal(signal.SIGCONT)
    yield
    signal.signal(signal.SIGCONT, before)


class Training:
    """Steps of one micro-batch, each of which is typical but for the first."""

    def __init__(self, schedule: Schedule) -> None:
        self.progress = Progress(schedule, CpuMeter(), count_suspensions())
        timed = np.arange(STEPS) > 0
        self.progress.batches = SimpleNamespace(  # type: ignore[assignment]
            step_micro_batches=1, worst_steps=1, steps=STEPS, timed=timed, collated=np.ones(STEPS)
        )
        self.progress.whole_step = WholeStep(micro_batches=1, mean_collated=1.0)
        self.control = SimpleNamespace(should_training_stop=False)

    def step(self, *, stopped: bool = False) -> None:
        """Train for a step."""
        self.progress.on_step_begin()
        with self.progress.micro_batch():
            if stopped:
                os.kill(os.getpid(), signal.SIGCONT)
        self.progress.on_step_end(None, None, self.control)


@pytest.mark.usefixtures("continued")
def test_a_step_in_which_the_process_was_stopped_is_not_timed() -> None:
    training = Training(Schedule(max_micro_batches=STEPS - 1))
    for stopped in (False, False, True, False):
        training.step(stopped=stopped)
    assert len(training.progress.timed.micro_batches) == len(training.progress.timed.updates) == 2


@pytest.mark.usefixtures("continued")
def test_a_run_whose_steps_were_stopped_ends_after_the_last_and_has_a_time() -> None:
    training = Training(Schedule(max_micro_batches=STEPS - 1))
    training.step()
    for _ in range(STEPS - 1):
        assert not training.control.should_training_stop
        training.step(stopped=True)
    assert training.control.should_training_stop
    assert len(training.progress.timed.micro_batches) == 1
