"""``RewardTrainer``: scores two sequences per row in one batch, with a head of one output."""

from __future__ import annotations

from typing import Any

import numpy as np
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

from autotune.step.models.heads import Head
from autotune.step.rows import Counts, column_lengths, rows_where
from autotune.step.trainers.base import Adapter


class _OnTokenizedRows(RewardTrainer):
    """TRL's trainer on tokenised rows; drops too long ones by the lengths of Arrow's lists, not one by one."""

    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: Any, dataset_name: str) -> Dataset:
        if args.max_length is None:
            return dataset
        longest = column_lengths(dataset, RewardModelling.columns).max(axis=1)
        return rows_where(dataset, longest <= args.max_length)


class RewardModelling(Adapter):
    """Rows of ``chosen_ids`` and ``rejected_ids``, each with its prompt; some also have a ``margin``."""

    name = "reward"
    config = RewardConfig
    trainer = RewardTrainer
    # RewardTrainer.__init__ sets this number where it loads a model by its name.
    head = Head(AutoModelForSequenceClassification, {"num_labels": 1})
    processor = AutoTokenizer
    columns = ("chosen_ids", "rejected_ids")
    on_rows = _OnTokenizedRows

    def trainable(self, rows: Dataset) -> Counts:
        """Return the tokens of both sequences, all of which affect the score."""
        return np.asarray(self.lengths(rows).sum(axis=1))


ADAPTER = RewardModelling()
