"""Tracks a probe's current phase, times its micro-batches and steps, and stops the trainer."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

from autotune.core.measurement import Schedule
from autotune.core.program import BACKWARD, CONSTRUCTION, FORWARD, MICRO_BATCH, OPTIMIZER_STEP, StepProgram
from autotune.step.run.batches import Batches
from autotune.step.run.meters import Mark, Meter
from autotune.step.run.timing import TimedGeneration, TimedMicroBatch, Timings, WholeStep, is_enough


class Progress(TrainerCallback):
    """Trainer callback that times the typical micro-batches and stops the trainer when the schedule is met.

    A step fetches all its micro-batches, trains on each, and then runs the update. The rest of a step's time counts as
    the update. A step in which the process was suspended is not timed, unless it is the last one.

    Args:
        count_stops: returns the number of suspensions of the process so far.

    Attributes:
        phase: the current phase of the step program.
        steps_done: completed optimizer steps, including those on the worst batch and for warm-up.
        first_step_seconds: when the first training step began, on the clock of :func:`time.monotonic`.
        last_step_seconds: when the last step ended.
        timed: the timings so far.
        worst_tokens: tokens, padding included, of the first micro-batch, which is the largest.
        batches: the batches of the run, set by :func:`autotune.step.run.training.train`.
        whole_step: the composition of a whole step of the plan, set there too.
        program: the phases of the run; until it is set there, the phases of every trainer.
        peaks: the device's peak in each completed phase, in bytes above the baseline.
        evaluation_seconds: time of an evaluation on all its rows; None without one.
        evaluated_seconds: end of each micro-batch of evaluation, on the clock of :func:`time.monotonic`.
        fetch_seconds: time to collate the step's micro-batches and place them on the device.
        finishing: whether the next step is the last one, which ends with the worst micro-batches again.
    """

    batches: Batches
    whole_step: WholeStep

    def __init__(self, schedule: Schedule, meter: Meter, count_stops: Callable[[], int] = lambda: 0) -> None:
        self.phase = CONSTRUCTION
        self.steps_done = 0
        self.first_step_seconds: float | None = None
        self.last_step_seconds: float | None = None
        self.timed = Timings()
        self.worst_tokens: int | None = None
        self.evaluation_seconds: float | None = None
        self.evaluated_seconds: list[float] = []
        self.finishing = False
        self.program = StepProgram()
        self.peaks: dict[str, int] = {}
        self._schedule = schedule
        self._meter = meter
        self._count_stops, self._stops_before = count_stops, count_stops()
        self._start_seconds = time.monotonic()
        self.fetch_seconds = 0.0
        self._marks: list[tuple[Mark, Mark]] = []
        self._generations: list[_Generation] = []

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Set the phase for the duration of the context; after an error, :attr:`phase` keeps the failed one.

        Phases inside evaluation, such as passes of a reference, count as evaluation.
        """
        if self.phase in self.program.after:
            yield
            return
        outer, self.phase = self.phase, phase
        is_measured = phase in self.program.phases
        if is_measured:
            self._record_peak(CONSTRUCTION if self.first_step_seconds is None else MICRO_BATCH)
        begin = self._meter.mark()
        yield
        if is_measured:
            self._record_peak(phase)
        if self._generations and self._generations[-1].end is None:
            self._generations[-1].phases.append((phase, begin, self._meter.mark()))
        self.phase = outer

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Time a generation of data for several micro-batches."""
        running = _Generation(len(self._marks), self._meter.mark())
        self._generations.append(running)
        yield
        running.end = self._meter.mark()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Set the phase to the backward pass until the next phase begins, except during evaluation."""
        if self.phase not in self.program.after:
            self.phase = BACKWARD
        yield

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Time a micro-batch."""
        begin = self._meter.mark()
        yield
        self._marks.append((begin, self._meter.mark()))

    def begin_update(self) -> None:
        """Set the phase to the update."""
        self._record_peak(MICRO_BATCH)
        self.phase = OPTIMIZER_STEP

    def on_step_begin(self, *events: Any, **more: Any) -> None:
        """Record the time of the first training step."""
        self.phase = FORWARD
        self._marks.clear()
        self._generations.clear()
        if self.first_step_seconds is None:
            self._record_peak(CONSTRUCTION)
            self.first_step_seconds = time.monotonic()

    def on_substep_end(self, *events: Any, **more: Any) -> None:
        """Record that the next micro-batch follows."""
        self.phase = FORWARD
        self._record_peak(MICRO_BATCH)

    def on_pre_optimizer_step(self, *events: Any, **more: Any) -> None:
        """Set the phase to the update, unless the backward pass has called the optimizer already (DeepSpeed)."""
        if self.phase != OPTIMIZER_STEP:
            self.begin_update()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        """Time the step, and stop the trainer once the schedule is met."""
        self._meter.synchronize()
        now = time.monotonic()
        index, self.steps_done = self.steps_done, self.steps_done + 1
        if self.finishing:
            control.should_training_stop = True
        else:
            others_left = self.steps_done < self.batches.steps - self._schedule.worst_last
            stops_before, self._stops_before = self._stops_before, self._count_stops()
            if stops_before == self._stops_before or not (self.timed.micro_batches or others_left):
                self._time_step(index, now)
            passed_seconds = now - self._start_seconds
            done = not others_left or is_enough(self._schedule, self.timed, self.whole_step, passed_seconds)
            # Ranks time their steps differently, and all have to stop after the same one.
            if self.steps_done >= self.batches.worst_steps and broadcast_object_list([done])[0]:
                self.finishing = self._schedule.worst_last
                control.should_training_stop = not self.finishing
        self.last_step_seconds = now
        self.phase = FORWARD
        self._record_peak(OPTIMIZER_STEP)
        return control

    def on_prediction_step(self, *events: Any, **more: Any) -> None:
        """Record the end of a micro-batch of evaluation."""
        self._meter.synchronize()
        self.evaluated_seconds.append(time.monotonic())

    def _record_peak(self, phase: str) -> None:
        """Record the device's peak at the end of a phase."""
        self.peaks[phase] = max(self.peaks.get(phase, 0), self._meter.lap())

    def _time_step(self, index: int, now: float) -> None:
        batches, first = self.batches, index * self.batches.step_micro_batches
        seconds = [end.seconds_after(begin) for begin, end in self._marks]
        generation_times = [(generation.micro_batch, generation.times()) for generation in self._generations]
        for place, generation in generation_times:
            seconds[place] -= generation.seconds
        places = [place for place in range(len(seconds)) if batches.timed[first + place]]
        if not places:
            return
        fetch_seconds, special = self.fetch_seconds / len(seconds), self.whole_step.special % len(seconds)
        self.timed.micro_batches += [
            TimedMicroBatch(
                seconds[place] + fetch_seconds, int(batches.collated[first + place]), place == special, fetch_seconds
            )
            for place in places
        ]
        self.timed.generations += [generation for place, generation in generation_times if place in places]
        # A step is timed from the end of the previous one; the first step is never timed.
        assert self.last_step_seconds is not None
        recorded_seconds = (
            self.fetch_seconds + sum(seconds) + sum(generation.seconds for _, generation in generation_times)
        )
        self.timed.updates.append(now - self.last_step_seconds - recorded_seconds)


@dataclass
class _Generation:
    """The marks of one generation.

    Attributes:
        micro_batch: index in the step of the micro-batch that runs it.
        phases: the phases inside it, each with the marks of its begin and end.
    """

    micro_batch: int
    begin: Mark
    end: Mark | None = None
    phases: list[tuple[str, Mark, Mark]] = field(default_factory=list)

    def times(self) -> TimedGeneration:
        """Return its times; the device has to be synchronised before."""
        assert self.end is not None
        phases: dict[str, float] = {}
        for name, begin, end in self.phases:
            phases[name] = phases.get(name, 0.0) + end.seconds_after(begin)
        return TimedGeneration(self.end.seconds_after(self.begin), phases)


def count_suspensions() -> Callable[[], int]:
    """Start counting suspensions of this process (SIGCONT); return a function that returns the count.

    A scheduler that suspends a job, such as Slurm's gang scheduling, stops each of its processes.
    """
    count = 0

    def increment(*_: object) -> None:
        nonlocal count
        count += 1

    signal.signal(signal.SIGCONT, increment)
    return lambda: count
