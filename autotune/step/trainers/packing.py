"""Builds model inputs for documents, each alone or packed into one row by TRL's own collator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling


def alone(document: Sequence[int]) -> dict[str, Any]:
    """Return the inputs of a model for one document, given its tokens."""
    return {"input_ids": torch.tensor([list(document)])}


def packed(documents: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the inputs of a model for documents in one row, as TRL's collator packs them for its trainer."""
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(
        [{"input_ids": list(ids)} for ids in documents]
    )
    del batch["labels"]
    return dict(batch)
