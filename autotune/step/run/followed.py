"""Subclasses TRL's trainer to report its progress and phases, and to train on the batches of a probe."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from accelerate.utils import recursively_apply, send_to_device

from autotune.core.plan import TrainingPlan
from autotune.step.distributed.state import before_update
from autotune.step.run.batches import Batches
from autotune.step.run.progress import Progress
from autotune.step.trainers.base import Adapter, InPhase


def followed(known: Adapter, plan: TrainingPlan, progress: Progress) -> type[Any]:
    """Return a subclass of a trainer that reports its micro-batches and their phases to ``progress``.

    It differs from its base in two ways, both for peak memory. If a probe leaves out micro-batches of a step, their
    tensors are still allocated, because ``Trainer.get_batch_samples`` places all of a step on the device at once. And
    the last step of a run, whichever it is, may end with the worst micro-batches.
    """

    trainer = known.trainer_class(plan)

    class Followed(trainer):  # type: ignore[misc, valid-type]  # the base is chosen while running
        _beside: Any = None
        _fetched: Any = None
        _worst: tuple[Any, ...] = ()

        def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
            began, batches, whole_step = time.monotonic(), progress.batches, progress.whole_step
            if progress.finishing:
                epoch_iterator = self._ending_worst(epoch_iterator, batches)
            samples, items = super().get_batch_samples(epoch_iterator, *args, **kwargs)
            progress.fetched(time.monotonic() - began)
            if progress.worst_tokens is None:
                progress.worst_tokens = known.loaded(self, samples[0])[1]
            # Not in timed steps: the copies would distort the time.
            beside = progress.steps_done < batches.worst_steps
            self._beside = self._left_out(samples, whole_step.micro_batches) if beside else []
            self._keep_worst(samples, batches)
            # Trainer holds them during evaluation, which a probe runs after the training.
            self._fetched = samples
            return samples, items

        def _keep_worst(self, samples: list[Any], batches: Batches) -> None:
            first = progress.steps_done * batches.step_micro_batches
            # Kept on the host, so that they need no device memory.
            here = (place - first for place in batches.worst if first <= place < first + len(samples))
            self._worst += tuple(_copied(samples[place], "cpu") for place in here)

        def _ending_worst(self, epoch_iterator: Iterator[Any], batches: Batches) -> Iterator[Any]:
            again = [batch for batch in self._worst[: batches.worst_at_once] for _ in range(batches.uses)]
            yield from itertools.islice(epoch_iterator, batches.step_micro_batches - len(again))
            yield from (send_to_device(batch, self.args.device) for batch in again)

        def _left_out(self, samples: list[Any], micro_batches: int) -> list[Any]:
            # Completions are generated for all micro-batches of a step, whether they are run or not.
            missing = 0 if known.generating else micro_batches - len(samples)
            return [_copied(samples[-1], self.args.device) for _ in range(missing)]

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            progress.begin_micro_batch()
            with before_update(self.accelerator, progress.begin_update):
                loss = super().training_step(*args, **kwargs)
            progress.end_micro_batch()
            return loss

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            # All trainers call this method for the backward pass; their loss methods differ.
            around(self.accelerator, "backward", progress.going_back)

    followed = with_phases(Followed, known.methods, progress.inside)
    return followed if known.generating is None else around(followed, known.generating, progress.generating)


def _copied(batch: Any, device: Any) -> Any:
    return recursively_apply(lambda tensor: tensor.to(device, copy=True), batch)


def with_phases(subclass: type[Any], methods: Mapping[str, str], in_phase: InPhase) -> type[Any]:
    """Return a subclass of a trainer in which methods that form a phase of their own run inside ``in_phase``.

    Args:
        methods: method names by phase name.
    """
    for name, method in methods.items():
        around(subclass, method, functools.partial(in_phase, name))
    return subclass


def around(owner: Any, name: str, context: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Return a class, or an object, whose method of that name runs inside a context."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    setattr(owner, name, wrapped)
    return owner
