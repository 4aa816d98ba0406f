"""A process that is stopped for a while, and what of it is timed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from autotune.core.measurement import Schedule
from autotune.step.process import counted_stops
from autotune.step.run.meters import CpuMeter
from autotune.step.run.progress import Progress
from autotune.step.run.timing import WholeStep

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
        self.progress = Progress(schedule, CpuMeter(), counted_stops())
        timed = np.arange(STEPS) > 0
        self.progress.batches = SimpleNamespace(  # type: ignore[assignment]
            step_micro_batches=1, worst_steps=1, steps=STEPS, timed=timed, collated=np.ones(STEPS)
        )
        self.progress.whole_step = WholeStep(micro_batches=1, mean_collated=1.0)
        self.control = SimpleNamespace(should_training_stop=False)

    def step(self, *, stopped: bool = False) -> None:
        """Train for a step."""
        self.progress.on_step_begin()
        self.progress.begin_micro_batch()
        if stopped:
            os.kill(os.getpid(), signal.SIGCONT)
        self.progress.end_micro_batch()
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
