"""Where a probe is, as the trainer tells it: phases for what goes wrong, and the clock of whole optimizer steps."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

from autotune.core.measurement import Schedule
from autotune.core.status import Phase
from autotune.step.batches import Batches
from autotune.step.meters import Meter
from autotune.step.timing import enough


class Progress(TrainerCallback):
    """Follows a trainer through its steps, times the typical ones, and stops it when they are known well enough.

    Attributes:
        phase: the part of a training step that it is in.
        steps_done: whole optimizer steps, the worst batch and warm-up included.
        first_step_seconds: when the first training step began, on the clock of :func:`time.monotonic`.
        last_step_seconds: when the last whole step ended.
        timed_seconds: wall clock of each timed step, from the end of the step before.
        timed_tokens: dataset tokens of each.
        worst_tokens: tokens, padding included, of the first micro-batch, which is the largest.
        batches: what the trainer trains on, or None before that is known.
    """

    def __init__(self, schedule: Schedule, meter: Meter) -> None:
        self.phase = Phase.CONSTRUCTION
        self.steps_done = 0
        self.first_step_seconds: float | None = None
        self.last_step_seconds: float | None = None
        self.timed_seconds: list[float] = []
        self.timed_tokens: list[int] = []
        self._schedule = schedule
        self._meter = meter
        self.worst_tokens: int | None = None
        self.batches: Batches | None = None

    def on_step_begin(self, *events: Any, **more: Any) -> None:
        """Note the first training step."""
        self.phase = Phase.FORWARD
        if self.first_step_seconds is None:
            self._meter.lap()
            self.first_step_seconds = time.monotonic()

    def on_substep_end(self, *events: Any, **more: Any) -> None:
        """Note that the next micro-batch follows."""
        self.phase = Phase.FORWARD
        self._meter.lap()

    def on_pre_optimizer_step(self, *events: Any, **more: Any) -> None:
        """Note that the gradients are there."""
        self.phase = Phase.OPTIMIZER_STEP

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        """Time the step, and stop the trainer after the last one that is needed."""
        assert self.batches is not None
        self._meter.synchronize()
        now = time.monotonic()
        index, self.steps_done = self.steps_done, self.steps_done + 1
        if index >= self.batches.worst_steps + self._schedule.warmup_steps:
            # The clock runs from one step's end to the next, so that loading data counts.
            before = self.last_step_seconds if self.last_step_seconds is not None else self.first_step_seconds
            assert before is not None
            self.timed_seconds.append(now - before)
            self.timed_tokens.append(int(self.batches.tokens[index]))
            control.should_training_stop = enough(self._schedule, self.timed_seconds, self.timed_tokens)
        self.last_step_seconds = now
        self.phase = Phase.FORWARD
        self._meter.lap()
        return control


def followed(trainer: type[Any], progress: Progress) -> type[Any]:
    """Return a subclass of a trainer that tells when a forward pass begins and ends; it does nothing else."""

    class Followed(trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            progress.phase = Phase.FORWARD
            if progress.worst_tokens is None:
                progress.worst_tokens = inputs["input_ids"].numel()
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            progress.phase = Phase.BACKWARD
            return loss

    return Followed
