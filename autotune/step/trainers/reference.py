"""Runs and reports the passes of a trainer's reference model: before training, or in each micro-batch."""

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

from autotune.core.program import PRECOMPUTE
from autotune.step.rows import TIMED_MICRO_BATCHES, Counts, column_lengths, quantile_indices
from autotune.step.trainers.base import Adapter, InPhase
from autotune.trainers.dpo import REFERENCE_PASS
from autotune.virtual import is_tracing

_Trl: Any = object
"""Placeholder for TRL's trainer, the next base class."""


class OnTokenizedRows(_Trl):
    """TRL's trainer on tokenised rows; a subclass precomputes the reference's log-probabilities for some of them.

    Attributes:
        adapter: the adapter of the trainer.
        seconds_per_row: time to precompute a row; 0 if nothing is precomputed.
    """

    adapter: Any
    seconds_per_row = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Skips the hash for TRL's cache file of precomputed values. A mock would keep a reference to the model.
        module = sys.modules[super().__init__.__module__]
        with mock.patch.object(module, "hash_module", lambda *_: ""):  # noqa: PT008
            super().__init__(*args, **kwargs)

    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: Any, dataset_name: str) -> Dataset:
        """Drop rows whose truncated sequence has only the prompt, as TRL does when it tokenises."""
        if args.max_length is None or getattr(args, "truncation_mode", "keep_start") != "keep_start":
            return dataset
        kept = column_lengths(dataset, ("prompt_ids",))[:, 0] < args.max_length
        return dataset if kept.all() else dataset.select(np.flatnonzero(kept))

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
        columns: Mapping[str, Counts],
    ) -> Dataset:
        """Run the reference on the widest micro-batches, then time it on a sample of all sizes.

        A row gets the mean log-probability of a token of this sample, for each token of its answer. Zeros would
        saturate the loss: gradients would be subnormal numbers, which a CPU takes about ten times as long for.

        A trace repeats the rows of its one micro-batch, is not timed, and has no values.

        Args:
            name: TRL's name of the dataset; only the pass over ``train`` is timed.
            widest: micro-batches, as indices of rows.
            blocks: all micro-batches of the pass; shape (micro-batches, rows).
            sizes: tokens of each micro-batch, to which its time is proportional; shape (micro-batches,).
            columns: tokens of each row's answer, by the column that TRL adds with its log-probability; shape (rows,).
        """
        self.run_widest(dataset, (np.resize(batch, blocks.shape[1]) for batch in widest) if is_tracing() else widest)
        if is_tracing() and getattr(self, "_precompute_engine", None) is not None:
            # DeepSpeed's engine records the order of modules in its first pass and uses it from the second on. If
            # training follows the first, it raises. This second pass is outside the phase, and not timed.
            self._run_reference(dataset, blocks[0])
        of_a_token = np.zeros(len(columns))
        if name == "train" and not is_tracing():
            start_seconds, timed = time.perf_counter(), quantile_indices(sizes, TIMED_MICRO_BATCHES)
            found = np.sum([self._run_reference(dataset, batch) for batch in blocks[timed]], axis=0)
            seconds = (time.perf_counter() - start_seconds) * sizes.sum() / sizes[timed].sum()
            # Blocks repeat rows to fill a last micro-batch.
            self.seconds_per_row = float(seconds) / blocks.size
            of_a_token = found / [max(1, tokens[blocks[timed]].sum()) for tokens in columns.values()]
        for (column, tokens), value in zip(columns.items(), of_a_token, strict=True):
            dataset = dataset.add_column(column, (value * tokens).tolist())
        return dataset

    def run_widest(self, dataset: Dataset, widest: Iterable[Counts]) -> None:
        """Run the reference on the widest micro-batches, which need the most memory."""
        for batch in widest:
            self._run_reference(dataset, batch)

    def _run_reference(self, dataset: Dataset, batch: Counts) -> list[float]:
        """Return the sum over the rows of each column's log-probabilities."""
        inputs = self._prepare_inputs(self.read_batch([dataset[int(index)] for index in batch]))
        results = self.compute_ref_log_probs(reference_model(self), inputs)
        # A copy to the host like TRL's; it synchronises the device.
        hosted = [values.cpu() for values in results if values is not None]
        return [] if is_tracing() else [float(values.sum()) for values in hosted]


class WithReference(Adapter):
    """Adapter of trainers with a reference, whose log-probabilities may be precomputed."""

    methods: ClassVar[Mapping[str, str]] = {PRECOMPUTE: "run_widest"}

    def watch(self, trainer: Any, in_phase: InPhase) -> None:
        """Report forward passes without gradients: they are the reference's, even if it is the trained model."""
        watch_reference(trainer, in_phase)


def watch_reference(trainer: Any, in_phase: InPhase, in_other_phase: Callable[[], bool] = lambda: False) -> None:
    """Report the forward passes of the reference, except in phases that are reported already."""
    running_phase = ExitStack()

    def enter(*_: Any) -> None:
        if not torch.is_grad_enabled() and not in_other_phase():
            running_phase.enter_context(in_phase(REFERENCE_PASS))

    model = trainer.ref_model or trainer.model
    model.register_forward_pre_hook(enter)
    model.register_forward_hook(lambda *_: running_phase.close())


def reference_model(trainer: Any) -> Any:
    """Return the reference model; the trained model if that is the reference (PEFT, ``precompute_ref_log_probs``).

    At that time DeepSpeed has not placed the model yet, so TRL wraps it in an engine for inference (trl 1.16,
    ``DPOTrainer._precompute_ref_logps``).
    """
    if trainer.ref_model is not None or not trainer.is_deepspeed_enabled:
        return trainer.ref_model or trainer.model
    if getattr(trainer, "_precompute_engine", None) is None:
        trainer._precompute_engine = prepare_deepspeed(trainer.model, trainer.accelerator)
    return trainer._precompute_engine
