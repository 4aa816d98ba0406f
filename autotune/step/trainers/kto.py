"""``KTOTrainer``: labelled rows, each paired with a mismatched answer from its micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from autotune.core.plan import TrainingPlan
from autotune.core.rows.blocks import block_rows, blocks_of, worst_blocks
from autotune.step.images.tokens import image_elements
from autotune.step.rows import Counts, RowSizes, column_lengths
from autotune.step.trainers.base import Collation, InPhase
from autotune.step.trainers.reference import OnTokenizedRows, WithReference, watch_reference
from autotune.trainers.kto import FEWEST_ROWS, POLICY_KL, REFERENCE_KL, WITHOUT_KL, estimates_kl, mismatched
from autotune.virtual import is_tracing

_MISMATCHED = "KL_completion_ids"


class _OnTokenizedRows(OnTokenizedRows):
    """TRL's trainer on tokenised rows; it precomputes the reference's log-probabilities for only some of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = kwargs["args"]
        rows = config.per_device_train_batch_size
        # TRL refuses to train on single rows, but evaluates them; the trace of an evaluation trains on one row.
        config.per_device_train_batch_size = max(FEWEST_ROWS, rows) if is_tracing() else rows
        super().__init__(*args, **kwargs)
        config.per_device_train_batch_size = self._train_batch_size = rows

    def _prepare_dataset(self, dataset: Dataset, processing_class: Any, args: Any, dataset_name: str) -> Dataset:
        # TRL's steps after tokenising: drop rows, then exchange answers within blocks.
        dataset = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        if not estimates_kl(args.loss_type):
            return dataset
        return dataset.map(
            _with_mismatched, batched=True, batch_size=args.per_device_train_batch_size, keep_in_memory=True
        )

    def _precompute_ref_logps(self, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        """Run the reference on the widest blocks, then time it on a sample of blocks for an extrapolation to all."""
        lengths = self.adapter.sequences(dataset, self.args.max_length)[:, 0]
        second_tokens = _mismatched_tokens(dataset, self.args)
        loads, blocks = blocks_of(lengths, second_tokens, batch_size), block_rows(len(dataset), batch_size)
        pairs = (
            {"ref_logps": lengths} if second_tokens is None else {"ref_logps": lengths, "ref_KL_logps": second_tokens}
        )
        columns = {column: pair - self.adapter.lengths(dataset)[:, 0] for column, pair in pairs.items()}
        # A last block with fewer rows repeats them in `blocks`, which would need more memory than TRL does.
        widest = [np.unique(blocks[place]) for place in worst_blocks(loads)]
        return self.precompute_sample(dataset, name, widest, blocks, loads.tokens + loads.second_tokens, columns)


class UnpairedPreference(WithReference):
    """Rows of ``prompt_ids``, ``completion_ids`` and ``label``."""

    columns = ("prompt_ids", "completion_ids", "label")
    collated_columns = ("prompt", "completion", "label", "chat_template_kwargs")
    on_rows = _OnTokenizedRows

    @property
    def tokenizing(self) -> Mapping[str, object]:
        """Return arguments with a loss that exchanges no answers: the exchange depends on the batch size."""
        return {**super().tokenizing, "loss_type": min(WITHOUT_KL)}

    def collated_tokens(self, collated: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return prompt and answer, which the collator joins into one sequence."""
        real, answer = collated["attention_mask"][0].bool(), collated["completion_mask"][0].bool()
        ids = collated["input_ids"][0]
        return {"prompt_ids": ids[real & ~answer], "completion_ids": ids[answer]}

    def trainable(self, rows: Dataset) -> Counts:
        """Return the tokens of the answer."""
        return self.lengths(rows)[:, 1]

    def sizes(self, trainer: Any) -> RowSizes:
        """Return the truncated sizes of rows, of their answers, and of mismatched pairs."""
        rows = trainer.train_dataset
        sequences, second_tokens = self.sequences(rows, trainer.args.max_length), _mismatched_tokens(rows, trainer.args)
        # TRL drops rows whose prompt alone fills the length.
        answers = sequences[:, 0] - self.lengths(rows)[:, 0]
        return RowSizes(sequences, answers, second_tokens=second_tokens, image_elements=image_elements(rows))

    def collation(self, trainer: Any) -> Collation:
        """Return a collation with micro-batches of successive rows, each padded to its own width."""
        return Collation(multiple=super().collation(trainer).multiple, blocks=True)

    def synthetic(self, rows: Sequence[tuple[int, ...]], plan: TrainingPlan, trainable: float) -> Dataset:
        """Return rows of one repeated token, alternately desirable and undesirable."""
        labels = [index % 2 == 0 for index in range(len(rows))]
        return super().synthetic(rows, plan, trainable).add_column("label", labels)

    def watch(self, trainer: Any, in_phase: InPhase) -> None:
        """Report passes without gradients: policy and reference on mismatched pairs, and the reference on the rows."""
        compute_kl = trainer._compute_kl_logps
        running: list[str] = []

        def log_probabilities(model: Any, batch: Any) -> Any:
            if not trainer.calculate_KL:
                return compute_kl(model, batch)
            # TRL runs the policy first, and the reference with gradients disabled.
            running.append(POLICY_KL if torch.is_grad_enabled() else REFERENCE_KL)
            with in_phase(running[-1]):
                logps = compute_kl(model, batch)
            running.pop()
            return logps

        trainer._compute_kl_logps = log_probabilities
        watch_reference(trainer, in_phase, lambda: bool(running))


def _with_mismatched(block: dict[str, list[Any]]) -> dict[str, list[Any]]:
    answers = block["completion_ids"]
    return {_MISMATCHED: [answers[-1], *answers[:-1]]}


def _mismatched_tokens(rows: Dataset, args: Any) -> Counts | None:
    """Return the tokens of each mismatched pair, truncated; shape (rows,). None without a KL divergence."""
    if not estimates_kl(args.loss_type):
        return None
    if _MISMATCHED in rows.column_names:
        pairs = column_lengths(rows, ("prompt_ids", _MISMATCHED)).sum(axis=1)
        return np.asarray(pairs if args.max_length is None else pairs.clip(max=args.max_length))
    # If rows have images, the collator exchanges the answers of each micro-batch.
    prompts, answers = column_lengths(rows, ("prompt_ids", "completion_ids")).T
    return mismatched(prompts, answers, args.per_device_train_batch_size, args.max_length)
