"""``SFTTrainer``: rows of tokens and labels, which the trainer itself packs, drops and pads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from autotune.core.plan import TrainingPlan
from autotune.core.workload import IGNORED_LABEL
from autotune.step.images.tokens import image_elements
from autotune.step.rows import Counts, RowSizes, counted_values, first_counted
from autotune.step.trainers.base import TOKEN, Adapter, Collation
from autotune.trainers import find_trainer


class SupervisedFineTuning(Adapter):
    """Rows of ``input_ids`` and ``labels``, which SFTTrainer takes as they are."""

    name = "sft"
    config = SFTConfig
    trainer = SFTTrainer
    columns = ("input_ids", "labels")
    collated_columns = ("messages", "prompt", "completion")

    @property
    def tokenizing(self) -> Mapping[str, object]:
        """Return arguments without packing."""
        return {**super().tokenizing, "packing": False}

    def trainable(self, rows: Dataset) -> Counts:
        """Return the number of labelled tokens of each row."""
        return counted_values(rows, "labels")

    def kept_from(self, rows: Dataset) -> Counts:
        """Return each row's length up to its first counted token: TRL drops a row that is cut before that token."""
        return np.asarray(first_counted(rows, "labels") + 1)

    def cut(self, rows: Dataset, plan: TrainingPlan) -> Dataset:
        """Return rows cut as those that a bundle has a copy of, if the plan truncates before the trainer does."""
        if plan.truncate_to is None:
            return rows
        cut = rows.with_format("arrow").map(_cut, batched=True, fn_kwargs={"length": plan.truncate_to})
        return cut.with_format(None)

    def sizes(self, trainer: Any) -> RowSizes:
        """Return the sizes of the trainer's rows, packed or not; its collator cuts those with images."""
        rows, elements = trainer.train_dataset, image_elements(trainer.train_dataset)
        cut = None if elements is None else trainer.args.max_length
        lengths = self.lengths(rows) if cut is None else self.lengths(rows).clip(max=cut)
        return RowSizes(lengths, counted_values(rows, "labels", cut), image_elements=elements)

    def collation(self, trainer: Any) -> Collation:
        """Return whether rows are concatenated, and to which multiple they are padded."""
        return Collation(flat=trainer.padding_free, multiple=trainer.args.pad_to_multiple_of or 1)

    def synthetic(self, rows: Sequence[tuple[int, ...]], plan: TrainingPlan, trainable: float) -> Dataset:
        """Return rows of one repeated token; truncation keeps the labels that count."""
        length = plan.truncate_to or (None if plan.args.get("packing") else plan.number("max_length"))
        tokens, labels = [], []
        for (full,) in rows:
            kept = min(full, length) if length else full
            ignored = kept - max(1, round(kept * trainable))
            tokens.append([TOKEN] * kept)
            labels.append([IGNORED_LABEL] * ignored + [TOKEN] * (kept - ignored))
        return Dataset.from_dict({"input_ids": tokens, "labels": labels})


ADAPTER = SupervisedFineTuning()


def _cut(rows: pa.Table, length: int) -> pa.Table:
    copied_rows = find_trainer(ADAPTER.name).copied_rows
    return pa.Table.from_batches([copied_rows(batch, length) for batch in rows.combine_chunks().to_batches()])
