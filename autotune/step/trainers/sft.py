"""``SFTTrainer``: rows of tokens and labels, which TRL's trainer packs, drops and pads itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

from autotune.core.plan import TrainingPlan
from autotune.core.rows.documents import NEVER_KEPT
from autotune.core.workload import IGNORED_LABEL, UNUSED_COLUMNS, Rollouts
from autotune.errors import InputError, UnreadError
from autotune.step.images.sizes import image_column
from autotune.step.images.tokens import image_elements
from autotune.step.rows import Counts, RowSizes, column_lengths, first_loss_token, loss_tokens
from autotune.step.trainers.base import TOKEN, Adapter, Collation
from autotune.techniques.padding_free import DOCUMENT_LENGTHS

TEXT = "text"
"""The default of ``dataset_text_field``."""


class SupervisedFineTuning(Adapter):
    """Rows of ``input_ids`` and ``labels``, which SFTTrainer accepts unchanged."""

    columns = ("input_ids", "labels")
    collated_columns = ("messages", "prompt", "completion")

    @property
    def tokenizing(self) -> Mapping[str, object]:
        """Return arguments without packing."""
        return {**super().tokenizing, "packing": False}

    def tokenized(self, trainer: Any, rollouts: Rollouts, dataset: str) -> Dataset:
        """Return the rows, each with a label for each token.

        Raises:
            InputError: a row of the user's own tokens has fewer or more labels, or flags of a mask; or the loss counts
                no token of any row.
            UnreadError: the documents of a row have other tokens together than the row, which TRL ignores unless rows
                are laid end to end.
        """
        rows = super().tokenized(trainer, rollouts, dataset)
        tokens, labels = column_lengths(rows, self.columns).T
        (uneven,) = np.nonzero(tokens != labels)
        if len(uneven):
            row = uneven[0]
            raise InputError(
                f"Row {row + 1:,} (counted from 1) of {dataset} has {tokens[row]:,} tokens, and labels or a mask for"
                f" {labels[row]:,}: TRL fails on such a row, or counts the wrong tokens.",
                hint="Write a label, or a flag of the mask, for each token.",
            )
        if tokens.any() and not self.trainable(rows).any():
            raise InputError(
                f"The loss counts no token of {dataset}: all its labels are {IGNORED_LABEL}.",
                hint="Write the token ids to train on as labels.",
            )
        if DOCUMENT_LENGTHS in rows.column_names:
            _check_documents(rows[DOCUMENT_LENGTHS], tokens, dataset)
        return rows

    def derived(self, plan: TrainingPlan) -> Mapping[str, object]:
        """Return that no column is removed: tokenised rows only have those that TRL's collators read."""
        return {UNUSED_COLUMNS: False}

    def collated(self, trainer: Any) -> tuple[str, ...]:
        """Return the columns that reach the collator; with all columns, the text gets TRL's own name for it."""
        rows, named = trainer.train_dataset, trainer.args.dataset_text_field
        if trainer.args.remove_unused_columns or named not in rows.column_names:
            return self.collated_columns
        if named != TEXT:
            others = rows.select_columns([name for name in rows.column_names if name != TEXT])
            trainer.train_dataset = others.rename_column(named, TEXT)
            trainer.data_collator.dataset_text_field = TEXT
        return (*self.collated_columns, TEXT)

    def trainable(self, rows: Dataset) -> Counts:
        """Return the number of labelled tokens of each row."""
        return loss_tokens(rows, "labels")

    def min_kept_length(self, rows: Dataset, *, keeps_end: bool = False) -> Counts:
        """Return each row's length from its kept end to the nearest counted token: TRL drops a row cut short of it.

        It drops a row without such a token wherever it cuts, whatever the length. It drops no row with images, so that
        one without such a token needs no length but its own.
        """
        first, lengths = first_loss_token(rows, "labels", from_end=keeps_end), self.lengths(rows)[:, 0]
        return np.where(first == lengths, NEVER_KEPT if image_column(rows) is None else lengths, first + 1)

    def cut(self, rows: Dataset, plan: TrainingPlan) -> Dataset:
        """Truncate rows as in a bundle's copy of the dataset, if the plan truncates before the trainer."""
        if plan.truncate_to is None:
            return rows
        known = {"copied_rows": self.specification.copied_rows, "length": plan.truncate_to}
        return rows.with_format("arrow").map(_cut, batched=True, fn_kwargs=known).with_format(None)

    def sizes(self, trainer: Any) -> RowSizes:
        """Return the sizes of the trainer's rows, packed or not; its collator truncates rows with images."""
        rows, elements = trainer.train_dataset, image_elements(trainer.train_dataset)
        cut = None if elements is None else trainer.args.max_length
        lengths = self.lengths(rows) if cut is None else self.lengths(rows).clip(max=cut)
        return RowSizes(lengths, loss_tokens(rows, "labels", cut), image_elements=elements)

    def collation(self, trainer: Any) -> Collation:
        """Return a collation that concatenates rows without padding (``padding_free``) or pads them."""
        return Collation(flat=trainer.padding_free, multiple=trainer.args.pad_to_multiple_of or 1)

    def synthetic(self, rows: Sequence[tuple[int, ...]], plan: TrainingPlan, trainable: float) -> Dataset:
        """Return rows of one repeated token, whose last tokens have labels."""
        length = plan.truncate_to or (None if plan.args.get("packing") else plan.number("max_length"))
        tokens, labels = [], []
        for (whole,) in rows:
            length_kept = min(whole, length) if length else whole
            ignored = length_kept - max(1, round(length_kept * trainable))
            tokens.append([TOKEN] * length_kept)
            labels.append([IGNORED_LABEL] * ignored + [TOKEN] * (length_kept - ignored))
        return Dataset.from_dict({"input_ids": tokens, "labels": labels})


def _check_documents(documents: Sequence[Any], tokens: Counts, dataset: str) -> None:
    """Check that the documents of each row have as many tokens together as the row.

    Args:
        documents: for each row, the tokens of its documents.
        tokens: tokens of each row; shape (rows,).
        dataset: the user's name of the dataset.

    Raises:
        UnreadError: a row has more or fewer.
    """
    for row, (lengths, whole) in enumerate(zip(documents, tokens.tolist(), strict=True), start=1):
        # TRL cannot add up anything but a list of numbers.
        held = sum(lengths) if isinstance(lengths, list) and None not in lengths else 0
        if held != whole:
            raise UnreadError(
                f"Row {row:,} (counted from 1) of {dataset} has {whole:,} tokens, and documents of {held:,} together"
                f" ({DOCUMENT_LENGTHS}): with padding_free, TRL ends at such a row, or takes tokens for those of"
                " another document.",
                hint=f"Write the length of each document of a row, or leave {DOCUMENT_LENGTHS} out.",
            )


def _cut(rows: pa.Table, copied_rows: Callable[..., pa.RecordBatch], length: int) -> pa.Table:
    return pa.Table.from_batches([copied_rows(batch, length) for batch in rows.combine_chunks().to_batches()])
