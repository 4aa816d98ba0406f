"""Which blocks FlexAttention looks at, held against PyTorch's own block masks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    padding_mask_function,
    sliding_window_causal_mask_function,
)

from autotune.virtual import adopt, trace
from autotune.virtual.block_mask import UnknownMaskError, count_blocks

BATCH, QUERIES = 2, 700
BLOCK = (128, 128)
DOCUMENTS = torch.repeat_interleave(torch.arange(4), torch.tensor([100, 400, 150, 50])).expand(BATCH, -1)
POSITIONS = torch.cat([torch.arange(length) for length in (100, 400, 150, 50)]).expand(BATCH, -1)
NOT_PADDED = torch.arange(QUERIES).expand(BATCH, -1) < torch.tensor([[700], [200]])


def packed(positions: torch.Tensor, documents: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return transformers' mask of rows that hold several documents; before 5.23 it did not look at positions."""
    mask: Callable[..., torch.Tensor] = and_masks(causal_mask_function, packed_sequence_mask_function(documents))
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):
        mask = masking_utils.packed_sequence_compatibility_function(causal_mask_function, positions, documents)
    return mask


MASKS: dict[str, Callable[..., torch.Tensor]] = {
    "causal": causal_mask_function,
    "window": sliding_window_causal_mask_function(200),
    "documents": packed(POSITIONS, DOCUMENTS),
    "padding": and_masks(causal_mask_function, padding_mask_function(NOT_PADDED)),
}


@pytest.mark.parametrize("name", MASKS)
def test_blocks_are_those_that_pytorch_finds(name: str) -> None:
    real = create_block_mask(MASKS[name], BATCH, None, QUERIES, QUERIES, device="cpu")

    partial, full = count_blocks(MASKS[name], (BATCH, 1, QUERIES, QUERIES), BLOCK)

    assert torch.equal(partial, real.kv_num_blocks)
    assert torch.equal(full, real.full_kv_num_blocks)


def test_large_masks_are_looked_at_here_and_there_and_come_to_the_same() -> None:
    tokens = 4096
    partial, full = count_blocks(causal_mask_function, (8, 1, tokens, tokens), BLOCK)

    rows = tokens // BLOCK[0]
    assert partial.sum() == 8 * rows
    assert full.sum() == 8 * rows * (rows - 1) / 2


def test_masks_over_tensors_of_a_trace_are_found_from_their_known_values() -> None:
    counts = []
    batch = DOCUMENTS.numpy().copy(), POSITIONS.numpy().copy()

    def fn(device: torch.device) -> None:
        documents, positions = adopt(batch)
        mask = packed(positions, documents)
        counts.append(count_blocks(mask, (BATCH, 1, QUERIES, QUERIES), BLOCK))

    trace(fn, target="cpu")

    real = count_blocks(MASKS["documents"], (BATCH, 1, QUERIES, QUERIES), BLOCK)
    assert all(torch.equal(traced, expected) for traced, expected in zip(counts[0], real, strict=True))


def test_a_mask_over_unknown_values_is_not_guessed() -> None:
    def fn(device: torch.device) -> None:
        unknown = torch.empty(BATCH, QUERIES, device=device) > 0
        with pytest.raises(UnknownMaskError):
            count_blocks(padding_mask_function(unknown), (BATCH, 1, QUERIES, QUERIES), BLOCK)

    trace(fn, target="cpu")
