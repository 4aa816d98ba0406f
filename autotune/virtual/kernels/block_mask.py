"""FlexAttention's block masks in a trace: index tensors of the right sizes, and block counts from known values."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autotune.virtual.operators.known import known, set_known
from autotune.virtual.recording.tensors import map_tree

INDICES = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip
# A mask over more query-key pairs is sampled at every second, fourth, … position of a block.
_MAX_SAMPLED_PAIRS = 2**22


class UnknownMaskError(LookupError):
    """A mask function reads values that are unknown in a trace."""


def block_mask_on(device: torch.device, mask_mod: Any, shape: tuple[int, int, int, int], size: tuple[int, int]) -> Any:
    """Return the ``BlockMask`` of PyTorch's compiled ``create_block_mask``, with fake index tensors.

    The compiled function fuses the token mask into its reduction to blocks, so the token mask is never allocated.

    Args:
        mask_mod: maps index tensors of row, head, query and key to a boolean: whether the query attends to the key.
        shape: rows, heads, queries, keys.
        size: queries and keys per block.
    """
    from torch.nn.attention.flex_attention import BlockMask

    batch, heads, queries, keys = shape
    rows, columns = -(-queries // size[0]), -(-keys // size[1])
    sums = torch.empty(batch, heads, rows, columns, dtype=torch.int64, device=device)
    partial, full = _ordered(sums), _ordered(sums)
    del sums
    try:
        counts = count_blocks(mask_mod, shape, size)
    except UnknownMaskError:
        pass
    else:
        set_known(partial[0], counts[0])
        set_known(full[0], counts[1])
    transposed = [_ordered(indices.transpose(-2, -1)) for _, indices in (partial, full)]
    found = (*partial, *full, *transposed[0], *transposed[1])
    tensors = dict(zip(INDICES, found, strict=True))
    return BlockMask(seq_lengths=(queries, keys), BLOCK_SIZE=size, mask_mod=mask_mod, **tensors)


def mask_tensors(block_mask: Any) -> list[Tensor]:
    """Return the tensors of a block mask that are saved for backward: its indices and the closure of its function."""
    if block_mask is None:
        return []
    indices = [getattr(block_mask, name) for name in INDICES]
    closure: dict[int, Tensor] = {}
    _collect(block_mask.mask_mod, closure)
    return [tensor for tensor in indices if tensor is not None] + list(closure.values())


def guard_key(part: Any, place: str, numbers: dict[str, int]) -> Any:
    """Return a key that is equal for two mask functions if Dynamo's guards, except those on numbers, accept both.

    Args:
        part: a mask function, or an object of its closure.
        place: the name of ``part`` in the call.
        numbers: output; the integers and tensor sizes found in ``part``, by name.
    """
    if isinstance(part, FunctionType):
        cells = [cell.cell_contents for cell in part.__closure__ or ()]
        return part.__code__, guard_key(cells, place, numbers)
    if isinstance(part, (tuple, list)):
        return tuple(guard_key(each, f"{place}.{index}", numbers) for index, each in enumerate(part))
    if isinstance(part, Tensor):
        numbers.update((f"{place}.size.{dimension}", size) for dimension, size in enumerate(part.shape))
        return type(part), part.dtype, part.dim()
    if isinstance(part, int) and not isinstance(part, bool):
        numbers[place] = part
        return int
    return part if isinstance(part, bool) else type(part)


def pairs_of(block_mask: Any, query: Tensor, key: Tensor) -> int:
    """Return the number of query-key pairs that one head attends to, summed over the rows of the batch.

    Every pair counts if there is no mask or its block counts are unknown.
    """
    batch, _, queries, _ = query.shape
    whole: int = batch * queries * key.size(2)
    if block_mask is None:
        return whole
    counts = [block_mask.kv_num_blocks, block_mask.full_kv_num_blocks]
    values = [known(count) for count in counts if count is not None]
    if any(value is None for value in values):
        return whole
    with _disable_current_modes():
        blocks = sum(int(value.sum()) / value.shape[:2].numel() for value in values if value is not None)
    return int(batch * blocks * block_mask.BLOCK_SIZE[0] * block_mask.BLOCK_SIZE[1])


def _ordered(dense: Tensor) -> tuple[Tensor, Tensor]:
    # torch/nn/attention/flex_attention.py, _dense_to_ordered: a stable sort of integers; the sorted values are dropped.
    # Sizes are [B, H, rows, columns].
    numbers = torch.empty(dense.shape, dtype=torch.int32, device=dense.device)
    values, order = torch.empty_like(numbers), torch.empty_like(numbers, dtype=torch.int64)
    counts = torch.empty(dense.shape[:-1], dtype=torch.int32, device=dense.device)
    del numbers, values
    return counts, torch.empty_like(order, dtype=torch.int32)


def count_blocks(mask_mod: Any, shape: tuple[int, int, int, int], size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the numbers of partial and of full blocks per row of blocks, on the host; shapes (B, H, rows).

    Args:
        mask_mod, shape, size: see :func:`block_mask_on`.

    Raises:
        UnknownMaskError: the function reads unknown values.
    """
    batch, heads, queries, keys = shape
    step = 1
    while batch * heads * queries * keys > _MAX_SAMPLED_PAIRS * step**2 and step < min(size):
        step *= 2
    with _disable_current_modes():
        strides = (1, 1, step, step)
        places = np.ix_(*(np.arange(0, length, stride) for length, stride in zip(shape, strides, strict=True)))
        with _OnKnownValues():
            mask = mask_mod(*map(torch.from_numpy, places))
        mask = mask.expand(*(place.size for place in places))
        height, width = (-(-side // step) for side in size)
        padding = (0, -mask.size(3) % width, 0, -mask.size(2) % height)
        mask = torch.nn.functional.pad(mask, padding)
        sums = mask.view(batch, heads, mask.size(2) // height, height, mask.size(3) // width, width).sum((3, 5))
        full = sums == height * width
        partial = (sums > 0) & ~full
        return partial.sum(-1, dtype=torch.int32), full.sum(-1, dtype=torch.int32)


class _OnKnownValues(TorchDispatchMode):
    """Dispatch mode that computes with the known values of fake tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values, words = map_tree((args, kwargs or {}), Tensor, _value)
        if "device" in words:
            words["device"] = torch.device("cpu")
        return func(*values, **words)


def _value(tensor: Tensor) -> Tensor:
    value = known(tensor)
    if value is None:
        raise UnknownMaskError
    return value


def _collect(node: Any, tensors: dict[int, Tensor]) -> None:
    if isinstance(node, Tensor):
        tensors[id(node)] = node
    elif isinstance(node, (tuple, list)):
        for item in node:
            _collect(item, tensors)
    elif isinstance(node, FunctionType):
        for cell in node.__closure__ or ():
            _collect(cell.cell_contents, tensors)
