"""Tracks the progress of a probe: its phase, for error reports, and the timing of micro-batches and steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback

from autotune.core.measurement import Schedule
from autotune.core.program import BACKWARD, CONSTRUCTION, FORWARD, MICRO_BATCH, OPTIMIZER_STEP, StepProgram
from autotune.step.distributed.group import agree
from autotune.step.run.batches import Batches
from autotune.step.run.meters import Mark, Meter
from autotune.step.run.timing import Timed, TimedGeneration, TimedMicroBatch, WholeStep, enough


class Progress(TrainerCallback):
    """Follows a trainer through its steps, times the typical micro-batches, and stops it when the schedule is met.

    A step fetches its micro-batches all at once, trains on each, and then runs the update. Time outside of fetching and
    micro-batches counts as the update, since it is spent once per step. A step in which the process was stopped for a
    while is not timed, unless no other is left.

    Args:
        stops: returns how often the process was stopped so far.

    Attributes:
        phase: the current phase of the step program.
        steps_done: completed optimizer steps, including those on the worst batch and for warm-up.
        first_step_seconds: when the first training step began, on the clock of :func:`time.monotonic`.
        last_step_seconds: when the last step ended.
        timed: what was timed so far.
        worst_tokens: tokens, padding included, of the first micro-batch, which is the largest.
        batches: the batches that the trainer trains on, set when they are chosen.
        whole_step: the composition of a step of the plan, set with them.
        program: the phases of the run; before they are known, those that every trainer has.
        peaks: by completed phase, the device's peak in bytes above the baseline during it.
        evaluation_seconds: time of an evaluation on all its rows, or None before it is known.
        evaluated_seconds: when each micro-batch of evaluation ended.
        finishing: whether the next step is the last, and ends with the worst micro-batches again.
    """

    batches: Batches
    whole_step: WholeStep

    def __init__(self, schedule: Schedule, meter: Meter, stops: Callable[[], int] = lambda: 0) -> None:
        self.phase = CONSTRUCTION
        self.steps_done = 0
        self.first_step_seconds: float | None = None
        self.last_step_seconds: float | None = None
        self.timed = Timed()
        self.worst_tokens: int | None = None
        self.evaluation_seconds: float | None = None
        self.evaluated_seconds: list[float] = []
        self.finishing = False
        self.program = StepProgram()
        self.peaks: dict[str, int] = {}
        self._schedule = schedule
        self._meter = meter
        self._stops, self._stopped = stops, stops()
        self._began_seconds = time.monotonic()
        self._fetch_seconds = 0.0
        self._began: Mark | None = None
        self._marks: list[tuple[Mark, Mark]] = []
        self._generations: list[_Generation] = []

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Set the phase for the duration of the context; after an error, :attr:`phase` names where it was raised.

        Phases inside evaluation, such as passes of a reference, count as evaluation.
        """
        if self.phase in self.program.after:
            yield
            return
        before, self.phase = self.phase, phase
        apart = phase in self.program.phases
        if apart:
            self._lap(CONSTRUCTION if self.first_step_seconds is None else MICRO_BATCH)
        began = self._meter.mark()
        yield
        if apart:
            self._lap(phase)
        if self._generations and self._generations[-1].ended is None:
            self._generations[-1].phases.append((phase, began, self._meter.mark()))
        self.phase = before

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Time a generation of data for several micro-batches."""
        running = _Generation(len(self._marks), self._meter.mark())
        self._generations.append(running)
        yield
        running.ended = self._meter.mark()

    @contextmanager
    def going_back(self) -> Iterator[None]:
        """Set the phase to the backward pass, from its beginning to that of the next phase.

        Evaluation, which computes losses too, has none.
        """
        if self.phase not in self.program.after:
            self.phase = BACKWARD
        yield

    def fetched(self, seconds: float) -> None:
        """Record how long it took to collate the next step's micro-batches and place them on the device."""
        self._fetch_seconds = seconds

    def begin_micro_batch(self) -> None:
        """Mark the beginning of a micro-batch."""
        self._began = self._meter.mark()

    def end_micro_batch(self) -> None:
        """Mark the end of its backward pass, unless that has ended with an update."""
        if self._began is not None:
            self._marks.append((self._began, self._meter.mark()))
            self._began = None

    def begin_update(self) -> None:
        """Mark the end of a backward pass in which an engine also calls the optimizer."""
        self.end_micro_batch()
        self._lap(MICRO_BATCH)
        self.phase = OPTIMIZER_STEP

    def on_step_begin(self, *events: Any, **more: Any) -> None:
        """Record the time of the first training step."""
        self.phase = FORWARD
        self._marks.clear()
        self._generations.clear()
        if self.first_step_seconds is None:
            self._lap(CONSTRUCTION)
            self.first_step_seconds = time.monotonic()

    def on_substep_end(self, *events: Any, **more: Any) -> None:
        """Record that the next micro-batch follows."""
        self.phase = FORWARD
        self._lap(MICRO_BATCH)

    def on_pre_optimizer_step(self, *events: Any, **more: Any) -> None:
        """Record that the gradients are complete, where that is not known yet."""
        if self.phase != OPTIMIZER_STEP:
            self._lap(MICRO_BATCH)
            self.phase = OPTIMIZER_STEP

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        """Time the step, and stop the trainer after the last step that is needed."""
        self._meter.synchronize()
        now = time.monotonic()
        index, self.steps_done = self.steps_done, self.steps_done + 1
        if self.finishing:
            control.should_training_stop = True
        else:
            others_left = self.steps_done < self.batches.steps - self._schedule.worst_last
            stopped, self._stopped = self._stopped, self._stops()
            if stopped == self._stopped or not (self.timed.micro_batches or others_left):
                self._time_step(index, now)
            passed_seconds = now - self._began_seconds
            done = not others_left or enough(self._schedule, self.timed, self.whole_step, passed_seconds)
            # Ranks time their steps differently, and all have to stop after the same one.
            if self.steps_done >= self.batches.worst_steps and agree(done):
                self.finishing = self._schedule.worst_last
                control.should_training_stop = not self.finishing
        self.last_step_seconds = now
        self.phase = FORWARD
        self._lap(OPTIMIZER_STEP)
        return control

    def on_prediction_step(self, *events: Any, **more: Any) -> None:
        """Record the end of a micro-batch of evaluation."""
        self._meter.synchronize()
        self.evaluated_seconds.append(time.monotonic())

    def _lap(self, phase: str) -> None:
        """Record the device's peak in a phase that ends."""
        self.peaks[phase] = max(self.peaks.get(phase, 0), self._meter.lap())

    def _time_step(self, index: int, now: float) -> None:
        batches, first = self.batches, index * self.batches.step_micro_batches
        took = [end.seconds_after(began) for began, end in self._marks]
        generated = [(one.micro_batch, one.timed()) for one in self._generations]
        for place, one in generated:
            took[place] -= one.seconds
        timed = [place for place in range(len(took)) if batches.timed[first + place]]
        if not timed:
            return
        fetch_seconds, special = self._fetch_seconds / len(took), self.whole_step.special % len(took)
        self.timed.micro_batches += [
            TimedMicroBatch(
                took[place] + fetch_seconds, int(batches.collated[first + place]), place == special, fetch_seconds
            )
            for place in timed
        ]
        self.timed.generations += [one for place, one in generated if place in timed]
        # A step is timed from the end of the previous one; the first step is never timed.
        assert self.last_step_seconds is not None
        inside = self._fetch_seconds + sum(took) + sum(one.seconds for _, one in generated)
        self.timed.updates.append(now - self.last_step_seconds - inside)


@dataclass
class _Generation:
    """The marks of one generation.

    Attributes:
        micro_batch: number of the micro-batch of the step that it belongs to.
        phases: names of the phases inside it, with their marks.
    """

    micro_batch: int
    began: Mark
    ended: Mark | None = None
    phases: list[tuple[str, Mark, Mark]] = field(default_factory=list)

    def timed(self) -> TimedGeneration:
        """Return its times, once the device has passed its marks."""
        assert self.ended is not None
        phases: dict[str, float] = {}
        for name, began, ended in self.phases:
            phases[name] = phases.get(name, 0.0) + ended.seconds_after(began)
        return TimedGeneration(self.ended.seconds_after(self.began), phases)
