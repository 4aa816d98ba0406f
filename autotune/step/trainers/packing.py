"""Builds model inputs of documents: each alone, or packed into one row by TRL's collator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling


def single_input(document: Sequence[int]) -> dict[str, Any]:
    """Return the model inputs of one document, given its tokens."""
    return {"input_ids": torch.tensor([list(document)])}


def packed_input(documents: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the model inputs of documents packed into one row by TRL's collator."""
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(
        [{"input_ids": list(ids)} for ids in documents]
    )
    del batch["labels"]
    return dict(batch)
