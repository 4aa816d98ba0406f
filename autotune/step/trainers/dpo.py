"""``DPOTrainer``: prompts with two answers each; the reference is a copy, the model itself, or precomputed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from datasets import Dataset

from autotune.core.rows.blocks import block_rows
from autotune.step.images.tokens import image_elements
from autotune.step.rows import Counts, RowSizes
from autotune.step.trainers.reference import OnTokenizedRows, WithReference


class _OnTokenizedRows(OnTokenizedRows):
    """TRL's trainer on tokenised rows; it precomputes the reference's log-probabilities for only some of them."""

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        """Run the reference on the widest rows, then time it on a sample of micro-batches, to extrapolate to all."""
        widths = self.adapter.sequences(dataset, self.args.max_length).max(axis=1)
        widest = np.argsort(-widths, kind="stable")[:batch_size]
        blocks, answers = block_rows(len(dataset), batch_size), self.adapter.answers(dataset, self.args)
        columns = {"ref_chosen_logps": answers[:, 0], "ref_rejected_logps": answers[:, 1]}
        return self.precompute_sample(dataset, name, [widest], blocks, widths[blocks].max(axis=1), columns)


class PreferenceOptimization(WithReference):
    """Rows of ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``."""

    columns = ("prompt_ids", "chosen_ids", "rejected_ids")
    collated_columns = ("prompt", "chosen", "rejected", "chat_template_kwargs")
    on_rows = _OnTokenizedRows

    def collated_tokens(self, collated: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return prompt and answers of a pair, which the collator joins into two sequences."""
        real, answers = collated["attention_mask"].bool(), collated["completion_mask"].bool()
        (prompt, _), (chosen, rejected) = (
            [ids[mask] for ids, mask in zip(collated["input_ids"], masks, strict=True)]
            for masks in (real & ~answers, answers)
        )
        return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}

    def trainable(self, rows: Dataset) -> Counts:
        """Return the tokens of both answers."""
        return np.asarray(self.lengths(rows)[:, 1:].sum(axis=1))

    def sizes(self, trainer: Any) -> RowSizes:
        """Return the sizes of both sequences and of their answers after truncation by the collator."""
        rows = trainer.train_dataset
        sequences, answers = self.sequences(rows, trainer.args.max_length), self.answers(rows, trainer.args)
        return RowSizes(sequences, np.asarray(answers.sum(axis=1)), image_elements=image_elements(rows))

    def answers(self, rows: Dataset, args: Any) -> Counts:
        """Return the tokens of both answers after truncation by the collator; shape (rows, 2)."""
        parts, sequences = self.lengths(rows), self.sequences(rows, args.max_length)
        # Truncation of the end leaves the rest of the answer; TRL drops rows whose prompt alone fills the length.
        keeps_start = args.truncation_mode == "keep_start"
        return np.asarray(sequences - parts[:, :1] if keeps_start else np.minimum(sequences, parts[:, 1:]))
