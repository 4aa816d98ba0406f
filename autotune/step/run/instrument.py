"""Subclasses TRL's trainer for a probe: reports progress and phases, and ends the run with the worst batches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate.utils import recursively_apply, send_to_device

from autotune.core.plan import TrainingPlan
from autotune.step.distributed.group import check_engine
from autotune.step.distributed.state import until_update
from autotune.step.run.batches import Batches
from autotune.step.run.progress import Progress
from autotune.step.trainers.base import Adapter, InPhase


def instrumented_class(adapter: Adapter, plan: TrainingPlan, progress: Progress) -> type[Any]:
    """Return a subclass of a trainer that reports its micro-batches and their phases to ``progress``.

    It changes two things for the sake of peak memory. Micro-batches of a step that the probe does not run are still
    allocated, because ``Trainer.get_batch_samples`` places all of a step on the device at once. And the last step of a
    run may end with the worst micro-batches.
    """

    trainer = adapter.trainer_class(plan)

    class Instrumented(trainer):  # type: ignore[misc, valid-type]  # the base is chosen while running
        _worst: tuple[Any, ...] = ()

        def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
            start_seconds, batches, whole_step = time.monotonic(), progress.batches, progress.whole_step
            if progress.finishing:
                epoch_iterator = self._with_worst_last(epoch_iterator, batches)
            samples, items = super().get_batch_samples(epoch_iterator, *args, **kwargs)
            progress.fetch_seconds = time.monotonic() - start_seconds
            if progress.worst_tokens is None:
                check_engine(self, plan)
                progress.worst_tokens = adapter.rows_and_tokens(self, samples[0])[1]
            # Timed steps have no copies, which would distort the time.
            adds_skipped = progress.steps_done < batches.worst_steps
            self._extra_batches = self._copies_of_skipped(samples, whole_step.micro_batches) if adds_skipped else []
            self._keep_worst(samples, batches)
            # Trainer keeps them during evaluation, which a probe runs after the training.
            self._fetched = samples
            return samples, items

        def _keep_worst(self, samples: list[Any], batches: Batches) -> None:
            first = progress.steps_done * batches.step_micro_batches
            # On the host, so that they need no device memory.
            positions = (place - first for place in batches.worst if first <= place < first + len(samples))
            self._worst += tuple(_copy(samples[place], "cpu") for place in positions)

        def _with_worst_last(self, epoch_iterator: Iterator[Any], batches: Batches) -> Iterator[Any]:
            again = [batch for batch in self._worst[: batches.worst_at_once] for _ in range(batches.uses)]
            yield from itertools.islice(epoch_iterator, batches.step_micro_batches - len(again))
            yield from (send_to_device(batch, self.args.device) for batch in again)

        def _copies_of_skipped(self, samples: list[Any], micro_batches: int) -> list[Any]:
            # Completions are generated for all micro-batches of a step, whether they are run or not.
            skipped = 0 if adapter.generating else micro_batches - len(samples)
            return [_copy(samples[-1], self.args.device) for _ in range(skipped)]

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            with until_update(self.accelerator, progress.micro_batch(), progress.begin_update):
                return super().training_step(*args, **kwargs)

    if adapter.generating:
        _run_inside(progress.generating(), Instrumented, adapter.generating)
    return report_phases(Instrumented, adapter.methods, progress.in_phase)


def _copy(batch: Any, device: Any) -> Any:
    return recursively_apply(lambda tensor: tensor.to(device, copy=True), batch)


def report_phases(subclass: type[Any], methods: Mapping[str, str], in_phase: InPhase) -> type[Any]:
    """Make the methods that form phases run inside ``in_phase``; return the class.

    Args:
        methods: method names by phase name.
    """
    for name, method in methods.items():
        _run_inside(in_phase(name), subclass, method)
    return subclass


def _run_inside(context: Any, owner: type[Any], method: str) -> None:
    """Make each call of a method run inside a new context of the same kind (``ContextDecorator``)."""
    setattr(owner, method, context(getattr(owner, method)))
