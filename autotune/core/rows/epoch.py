"""The batches, steps and time of an epoch of one candidate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """The batches and steps of one epoch.

    Attributes:
        token_coverage: share of the dataset's tokens, 0 to 1, that it trains on.
        row_coverage: share of the dataset's rows, 0 to 1, that it trains on, whole or cut.
        max_length: tokens to which rows are cut or packed; None if they are not.
        documents_per_step: mean dataset rows of an optimizer step.
        tokens_per_step: mean dataset tokens of an optimizer step.
        steps_per_epoch: optimizer steps in an epoch; None without a dataset.
        seconds_per_epoch: kept dataset tokens divided by the token rate; None without either.
    """

    token_coverage: float
    row_coverage: float = 1.0
    max_length: int | None
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    documents_per_step: float | None
    tokens_per_step: float | None = None
    steps_per_epoch: int | None
    seconds_per_epoch: float | None
