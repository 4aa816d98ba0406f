"""FlexAttention: its blocks, compared with PyTorch's masks, and the calls for which Dynamo compiles it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import masking_utils
from transformers.masking_utils import (
    add_offsets_to_mask_function,
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    padding_mask_function,
    sliding_window_causal_mask_function,
)

from autotune.virtual import trace, trace_inputs
from autotune.virtual.kernels.block_mask import UnknownMaskError, count_blocks
from autotune.virtual.kernels.flex import KEEPS_ARGUMENTS, Versions, guards_of

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
        documents, positions = trace_inputs(batch)
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


HEADS, SHARED, HEAD = 4, 2, 16


class Call(NamedTuple):
    """A call of attention: rows, queries, keys, and how it is made."""

    rows: int
    queries: int
    keys: int
    grad: bool = False
    padded: bool = False


def same(rows: int, tokens: int, **how: bool) -> Call:
    return Call(rows, tokens, tokens, **how)


CASES: dict[str, Sequence[Call]] = {
    "widths": [same(2, 300), same(2, 260), same(2, 200), same(2, 300)],
    "rows": [same(2, 300), same(3, 260), same(4, 200), same(1, 200), same(1, 260)],
    "rows later": [same(2, 300), same(2, 260), same(3, 200), same(4, 300)],
    "gradients": [same(2, tokens, grad=grad) for tokens in (300, 260, 200) for grad in (False, True)],
    "padding": [same(2, 300, padded=True), same(2, 300), same(2, 260, padded=True), same(2, 260)],
    "generation": [
        same(3, 300), *(Call(3, 1, keys) for keys in (301, 302, 303)), same(3, 310, grad=True), same(3, 270, grad=True),
        same(3, 250), Call(3, 1, 251), Call(3, 1, 252),
    ],
}  # fmt: skip


def given(call: Call) -> tuple[tuple[Tensor, ...], Any]:
    """Return arguments as transformers makes them."""
    sizes = ((HEADS, call.queries), (SHARED, call.keys), (SHARED, call.keys))
    tensors = tuple(torch.randn(call.rows, heads, tokens, HEAD) for heads, tokens in sizes)
    mask = causal_mask_function
    if call.padded:
        mask = and_masks(mask, padding_mask_function(torch.ones(call.rows, call.keys, dtype=torch.bool)))
    mask = add_offsets_to_mask_function(mask, call.keys - call.queries, 0)
    return tensors, create_block_mask(mask, call.rows, None, call.queries, call.keys, device="cpu")


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly) if name in ("widths", "rows later") else name for name in CASES],
)
@pytest.mark.usefixtures("no_collection")
def test_the_calls_that_are_compiled_are_those_of_dynamo_which_keeps_some_of_their_arguments(
    name: str,
) -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled, versions = torch.compile(flex_attention, backend=counted), Versions()
    for call in CASES[name]:
        before = len(graphs)
        with torch.set_grad_enabled(call.grad):
            (query, key, value), mask = given(call)
            version = versions.compiled_for(*guards_of((query, key, value), mask))
            compiled(query, key, value, block_mask=mask, enable_gqa=True)
        kept = [weakref.ref(tensor) for tensor in (query, key, value)]
        del query, key, value, mask
        assert (version is not None) == (len(graphs) > before), call
        assert [each() is not None for each in kept] == [KEEPS_ARGUMENTS and version is not None] * 3, call
    torch._dynamo.reset()
