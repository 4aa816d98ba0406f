"""``DPOTrainer``: prompts with two answers each; the reference is a copy, the model itself, or precomputed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer
from trl.trainer import dpo_trainer

from autotune.step.rows import Counts, RowSizes, column_lengths
from autotune.step.trainers.base import InPhase
from autotune.step.trainers.reference import TIMED, AskingReference, OnTokenizedRows, reference_of
from autotune.trainers.dpo import PRECOMPUTE, REFERENCE_PASS


class _OnTokenizedRows(OnTokenizedRows, DPOTrainer):
    """TRL's trainer on tokenised rows; it precomputes the reference's log-probabilities for only some of them."""

    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: Any, dataset_name: str) -> Dataset:
        # TRL drops these rows when it tokenises.
        length = args.max_length
        if length is None or args.truncation_mode != "keep_start":
            return dataset
        kept = np.flatnonzero(column_lengths(dataset, ("prompt_ids",))[:, 0] < length)
        return dataset if len(kept) == len(dataset) else dataset.select(kept)

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        """Run the reference on the widest rows, then on some others, whose time is extrapolated to all rows."""
        widest_first = np.argsort(-_sequences(dataset, self.args.max_length).max(axis=1), kind="stable")
        widest = np.resize(widest_first, batch_size)
        others = np.random.default_rng(0).permutation(len(dataset))
        typical = [others[first : first + batch_size] for first in range(0, len(others), batch_size)][:TIMED]
        self._ask(dataset, widest)
        seconds = self._timed([batch for batch in typical if len(batch) == batch_size], dataset)
        if name == "train":
            self.seconds_per_row = {PRECOMPUTE: seconds}
        zeros = [0.0] * len(dataset)
        return dataset.add_column("ref_chosen_logps", zeros).add_column("ref_rejected_logps", zeros)

    def _timed(self, batches: Sequence[Counts], dataset: Dataset) -> float:
        started, rows = time.perf_counter(), 0
        for batch in batches:
            self._ask(dataset, batch)
            rows += len(batch)
        return (time.perf_counter() - started) / rows if rows else 0.0

    def _ask(self, dataset: Dataset, batch: Counts) -> None:
        inputs = self._prepare_inputs(self.read_batch([dataset[int(index)] for index in batch]))
        chosen, _ = self.compute_ref_log_probs(reference_of(self), inputs)
        # As TRL does with each batch; this waits for the device.
        chosen.cpu()


class PreferenceOptimization(AskingReference):
    """Rows of ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``."""

    name = "dpo"
    config = DPOConfig
    trainer = DPOTrainer
    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    module = dpo_trainer
    on_rows = _OnTokenizedRows

    def trainable(self, rows: Dataset) -> Counts:
        """Return the tokens of both answers."""
        return np.asarray(self.lengths(rows)[:, 1:].sum(axis=1))

    def sizes(self, trainer: Any) -> RowSizes:
        """Return the sizes of both sequences, truncated as the collator truncates them."""
        rows = trainer.train_dataset
        return RowSizes(_sequences(rows, trainer.args.max_length), self.trainable(rows))

    def watch(self, trainer: Any, in_phase: InPhase) -> None:
        """Report forward passes without gradients, which are those of the reference, whichever model it is."""
        inside: list[AbstractContextManager[Any]] = []

        def enter(*_: Any) -> None:
            if not torch.is_grad_enabled():
                inside.append(in_phase(REFERENCE_PASS))
                inside[-1].__enter__()

        def leave(*_: Any) -> None:
            if inside:
                inside.pop().__exit__(None, None, None)

        model = trainer.ref_model or trainer.model
        model.register_forward_pre_hook(enter)
        model.register_forward_hook(leave)


ADAPTER = PreferenceOptimization()


def _sequences(rows: Dataset, length: int | None) -> Counts:
    """Return the tokens of prompt plus chosen and prompt plus rejected answer, truncated; shape (rows, 2)."""
    parts = column_lengths(rows, PreferenceOptimization.columns)
    sequences = parts[:, :1] + parts[:, 1:]
    return sequences if length is None else np.minimum(sequences, length)
