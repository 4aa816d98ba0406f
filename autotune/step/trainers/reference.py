"""The reference model of a trainer: its passes, beforehand or in each micro-batch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from datasets import Dataset
from trl.models import prepare_deepspeed

from autotune.step.rows import TIMED, Counts, column_lengths, rows_where, spread
from autotune.step.trainers.base import Adapter, InPhase
from autotune.trainers.dpo import PRECOMPUTE, REFERENCE_PASS
from autotune.virtual import is_tracing

_Trl: Any = object
"""Placeholder for TRL's trainer, the next base class."""


class OnTokenizedRows(_Trl):
    """TRL's trainer on tokenised rows; a subclass precomputes the reference's log-probabilities for some of them.

    Attributes:
        seconds_per_row: of that pass; 0 without one.
    """

    seconds_per_row = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The hash names TRL's cache file of precomputed values; no cache is kept here. A mock would keep the model.
        module = sys.modules[super().__init__.__module__]
        with mock.patch.object(module, "hash_module", lambda *_: ""):  # noqa: PT008
            super().__init__(*args, **kwargs)

    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: Any, dataset_name: str) -> Dataset:
        """Drop rows of which truncation from the end leaves only the prompt, as TRL does when it tokenises."""
        if args.max_length is None or getattr(args, "truncation_mode", "keep_start") != "keep_start":
            return dataset
        return rows_where(dataset, column_lengths(dataset, ("prompt_ids",))[:, 0] < args.max_length)

    def read_batch(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Collate rows as the data loader would."""
        return self.data_collator(list(rows))

    def precompute_sample(
        self,
        dataset: Dataset,
        name: str,
        widest: Iterable[Counts],
        blocks: Counts,
        sizes: Counts,
        columns: Sequence[str],
    ) -> Dataset:
        """Run the reference on the widest micro-batches, then time it on some of all sizes.

        A trace has the rows of one micro-batch, which it repeats; the operators are its time.

        Args:
            name: of the dataset; the time is kept of ``train``.
            widest: micro-batches, as indices of rows.
            blocks: all micro-batches of the pass; shape (micro-batches, rows).
            sizes: of them, which their times are proportional to.
            columns: that TRL adds with the results; here they are zeros.
        """
        self.ask_widest(dataset, (np.resize(batch, blocks.shape[1]) for batch in widest) if is_tracing() else widest)
        if is_tracing() and getattr(self, "_precompute_engine", None) is not None:
            # DeepSpeed's engine records the order of modules in its first pass and uses it from the second on. If
            # training follows the first, it raises. This second pass is outside the phase, and not timed.
            self._ask(dataset, blocks[0])
        if name == "train" and not is_tracing():
            started, timed = time.perf_counter(), spread(sizes, TIMED)
            for batch in blocks[timed]:
                self._ask(dataset, batch)
            seconds = (time.perf_counter() - started) * sizes.sum() / sizes[timed].sum()
            # A last micro-batch with fewer rows repeats them.
            self.seconds_per_row = float(seconds) / blocks.size
        for column in columns:
            dataset = dataset.add_column(column, [0.0] * len(dataset))
        return dataset

    def ask_widest(self, dataset: Dataset, widest: Iterable[Counts]) -> None:
        """Run the reference on the widest micro-batches, which need the most memory."""
        for batch in widest:
            self._ask(dataset, batch)

    def _ask(self, dataset: Dataset, batch: Counts) -> None:
        inputs = self._prepare_inputs(self.read_batch([dataset[int(index)] for index in batch]))
        for values in self.compute_ref_log_probs(reference_of(self), inputs):
            if values is not None:
                # As TRL does with each batch; this waits for the device.
                values.cpu()


class WithReference(Adapter):
    """The child's side of trainers with a reference, whose log-probabilities may be precomputed."""

    methods: ClassVar[Mapping[str, str]] = {PRECOMPUTE: "ask_widest"}

    def watch(self, trainer: Any, in_phase: InPhase) -> None:
        """Report forward passes without gradients, which are those of the reference, whichever model it is."""
        watch_reference(trainer, in_phase)


def watch_reference(trainer: Any, in_phase: InPhase, in_other_phase: Callable[[], bool] = lambda: False) -> None:
    """Report the forward passes of the reference, but for those in a phase that is reported already."""
    inside = ExitStack()

    def enter(*_: Any) -> None:
        if not torch.is_grad_enabled() and not in_other_phase():
            inside.enter_context(in_phase(REFERENCE_PASS))

    model = trainer.ref_model or trainer.model
    model.register_forward_pre_hook(enter)
    model.register_forward_hook(lambda *_: inside.close())


def reference_of(trainer: Any) -> Any:
    """Return the reference, or the model itself if that precomputes (``precompute_ref_log_probs``).

    By then DeepSpeed has not placed the model yet, so TRL wraps it in an engine for inference (trl 1.16,
    ``DPOTrainer._precompute_ref_logps``).
    """
    if trainer.ref_model is not None or not trainer.is_deepspeed_enabled:
        return trainer.ref_model or trainer.model
    if getattr(trainer, "_precompute_engine", None) is None:
        trainer._precompute_engine = prepare_deepspeed(trainer.model, trainer.accelerator)
    return trainer._precompute_engine
