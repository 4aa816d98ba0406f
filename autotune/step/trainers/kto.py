"""``KTOTrainer``: labelled rows, each with the mismatched answer that TRL pairs it with in its micro-batch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from trl import KTOConfig, KTOTrainer
from trl.trainer import kto_trainer

from autotune.core.blocks import blocks_of, worst_blocks
from autotune.core.plan import TrainingPlan
from autotune.step.rows import Counts, RowSizes, column_lengths
from autotune.step.trainers.base import Collation, InPhase
from autotune.step.trainers.reference import TIMED, AskingReference, OnTokenizedRows, reference_of
from autotune.trainers.kto import POLICY_KL, PRECOMPUTE, REFERENCE_KL, REFERENCE_PASS, WITHOUT_KL, estimates_kl

_MISMATCHED = "KL_completion_ids"


class _OnTokenizedRows(OnTokenizedRows, KTOTrainer):
    """TRL's trainer on tokenised rows; it precomputes the reference's log-probabilities for only some of them."""

    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: Any, dataset_name: str) -> Dataset:
        # What TRL does with rows once they are tokenised: it drops some, then exchanges answers within blocks.
        if args.max_length is not None:
            kept = np.flatnonzero(column_lengths(dataset, ("prompt_ids",))[:, 0] < args.max_length)
            dataset = dataset if len(kept) == len(dataset) else dataset.select(kept)
        if not estimates_kl(args.loss_type):
            return dataset
        return dataset.map(
            _with_mismatched, batched=True, batch_size=args.per_device_train_batch_size, keep_in_memory=True
        )

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        """Run the reference on the widest blocks, then on some others, whose time is extrapolated to all rows."""
        own, beside = _own(dataset, self.args.max_length), _beside(dataset, self.args.max_length)
        known = blocks_of(own, beside, batch_size)
        for place in worst_blocks(known):
            self._ask(dataset, place, batch_size)
        others = np.random.default_rng(0).permutation(max(1, len(dataset) // batch_size))[:TIMED]
        started, rows = time.perf_counter(), 0
        for place in others.tolist():
            rows += self._ask(dataset, place, batch_size)
        if name == "train":
            self.seconds_per_row = {PRECOMPUTE: (time.perf_counter() - started) / rows}
        columns = ("ref_logps", "ref_KL_logps") if beside is not None else ("ref_logps",)
        for column in columns:
            dataset = dataset.add_column(column, [0.0] * len(dataset))
        return dataset

    def _ask(self, dataset: Dataset, place: int, batch_size: int) -> int:
        """Run the reference on a block of so many rows; return how many it has."""
        first = place * batch_size
        rows = [dataset[index] for index in range(first, min(first + batch_size, len(dataset)))]
        found = self.compute_ref_log_probs(reference_of(self), self._prepare_inputs(self.read_batch(rows)))
        for values in found:
            if values is not None:
                # As TRL does with each batch; this waits for the device.
                values.cpu()
        return len(rows)


class UnpairedPreference(AskingReference):
    """Rows of ``prompt_ids``, ``completion_ids`` and ``label``."""

    name = "kto"
    config = KTOConfig
    trainer = KTOTrainer
    columns = ("prompt_ids", "completion_ids", "label")
    module = kto_trainer
    on_rows = _OnTokenizedRows

    @property
    def tokenizing(self) -> Mapping[str, object]:
        """Return arguments with a loss for which no answers are exchanged: which ones depends on the batch size."""
        return {**super().tokenizing, "loss_type": min(WITHOUT_KL)}

    def trainable(self, rows: Dataset) -> Counts:
        """Return the tokens of the answer."""
        return self.lengths(rows)[:, 1]

    def sizes(self, trainer: Any) -> RowSizes:
        """Return the sizes of rows and of mismatched pairs, truncated as the collator truncates them."""
        rows, length = trainer.train_dataset, trainer.args.max_length
        return RowSizes(_own(rows, length)[:, None], self.trainable(rows), beside=_beside(rows, length))

    def collation(self, trainer: Any) -> Collation:
        """Return that micro-batches are blocks of successive rows, padded each on its own."""
        return Collation(multiple=super().collation(trainer).multiple, blocks=True)

    def synthetic(
        self, rows: Sequence[tuple[int, ...]], plan: TrainingPlan, arguments: Any, trainable: float
    ) -> Dataset:
        """Return rows of one repeated token, desirable and not in turn."""
        labels = [place % 2 == 0 for place in range(len(rows))]
        return super().synthetic(rows, plan, arguments, trainable).add_column("label", labels)

    def watch(self, trainer: Any, in_phase: InPhase) -> None:
        """Report the passes without gradients: both on mismatched pairs, and the reference's on the rows."""
        compute, inside = trainer._compute_kl_logps, ExitStack()
        apart: list[str] = []

        def told(model: Any, batch: Any) -> Any:
            if not trainer.calculate_KL:
                return compute(model, batch)
            # TRL asks the policy before it turns gradients off for all that it asks the reference.
            apart.append(POLICY_KL if torch.is_grad_enabled() else REFERENCE_KL)
            with in_phase(apart[-1]):
                logps = compute(model, batch)
            apart.pop()
            return logps

        def enter(*_: Any) -> None:
            if not torch.is_grad_enabled() and not apart:
                inside.enter_context(in_phase(REFERENCE_PASS))

        def leave(*_: Any) -> None:
            inside.close()

        trainer._compute_kl_logps = told
        model = trainer.ref_model or trainer.model
        model.register_forward_pre_hook(enter)
        model.register_forward_hook(leave)


ADAPTER = UnpairedPreference()


def _with_mismatched(block: dict[str, list[Any]]) -> dict[str, list[Any]]:
    answers = block["completion_ids"]
    return {_MISMATCHED: [answers[-1], *answers[:-1]]}


def _own(rows: Dataset, length: int | None) -> Counts:
    """Return the tokens of each row, truncated; shape (rows,)."""
    return _truncated(column_lengths(rows, ("prompt_ids", "completion_ids")), length)


def _beside(rows: Dataset, length: int | None) -> Counts | None:
    """Return the tokens of each mismatched pair, truncated; shape (rows,). None without a KL divergence."""
    if _MISMATCHED not in rows.column_names:
        return None
    return _truncated(column_lengths(rows, ("prompt_ids", _MISMATCHED)), length)


def _truncated(parts: Counts, length: int | None) -> Counts:
    tokens = parts.sum(axis=1)
    return np.asarray(tokens if length is None else np.minimum(tokens, length))
