"""``RewardTrainer``: scores two sequences per row in one batch, with a head of one output."""

from __future__ import annotations

import numpy as np
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from autotune.step.models.heads import Head
from autotune.step.rows import Counts
from autotune.step.trainers.base import Adapter


class RewardModelling(Adapter):
    """Rows of ``chosen_ids`` and ``rejected_ids``, which RewardTrainer accepts unchanged; some have a ``margin``."""

    # RewardTrainer.__init__ sets this number where it loads a model by its name.
    head = Head(AutoModelForSequenceClassification, {"num_labels": 1})
    processor = AutoTokenizer
    columns = ("chosen_ids", "rejected_ids")

    def trainable(self, rows: Dataset) -> Counts:
        """Return the tokens of both sequences, all of which affect the score."""
        return np.asarray(self.lengths(rows).sum(axis=1))
