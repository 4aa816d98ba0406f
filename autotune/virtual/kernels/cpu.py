"""Workspaces of PyTorch's CPU kernels, each rule with its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch

from autotune.virtual.operators.workspaces import common

_aten = torch.ops.aten
# aten/src/ATen/native/ReduceOps.cpp: on the CPU a reduction first casts its input to the dtype of its result.
_REDUCTIONS = frozenset({_aten.sum, _aten.mean, _aten.prod, _aten.cumsum, _aten.cumprod})
# aten/src/ATen/native/cpu/ScatterGatherKernel.cpp, create_acc_buffer: half-precision results accumulate in float32.
_IN_FLOAT32 = frozenset({_aten.gather, _aten.scatter, _aten.scatter_, _aten.scatter_add, _aten.scatter_add_})
# Tagged as pointwise, but they cast per element or have a mask among their operands, so no operand is cast first.
_CONVERT_THEMSELVES = frozenset({
    _aten.copy_, _aten._to_copy, _aten.where, _aten.clone, _aten.masked_fill, _aten.masked_fill_,
})  # fmt: skip
# aten/src/ATen/native: cpu/layer_norm_kernel.cpp and cpu/group_norm_kernel.cpp sum the gradients of weight and bias in
# float32, per thread or per row; Normalization.cpp, batch_norm_backward_cpu_template, makes a second gradient.
_NORMS: Mapping[Any, Callable[[Any], tuple[int, ...]]] = {
    _aten.native_layer_norm_backward: lambda args: (8 * torch.get_num_threads() * prod(args[2]),),
    _aten.native_group_norm_backward: lambda args: (4 * args[5] * args[6],) * 2,
    _aten.native_batch_norm_backward: lambda args: (args[1].numel() * args[1].itemsize,),
}
_FLASH = _aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_REDUCED = (torch.bfloat16, torch.float16)


def scratch(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, ...]:
    """Return the bytes of the blocks that an operator's CPU kernel allocates and frees before it returns."""
    if func is _FLASH:
        return _flash(args[0], args[1])
    if func is _FLASH_BACKWARD:
        return _flash_backward(args[1], args[2])
    packet = func.overloadpacket
    in_half = isinstance(result, torch.Tensor) and result.dtype in _REDUCED
    if packet in _IN_FLOAT32:
        return (4 * result.numel(),) if in_half else ()
    if packet is _aten.mean and in_half:
        # aten/src/ATen/native/ReduceOps.cpp, mean_out: the sum and its quotient are float32.
        return (*_converted((args[0],), torch.float32), 4 * result.numel())
    if packet in _REDUCTIONS:
        return _converted((args[0],), result.dtype)
    if torch.Tag.pointwise in func.tags and packet not in _CONVERT_THEMSELVES:
        return _promoted(args)
    more = _NORMS[packet](args) if packet in _NORMS else ()
    return (*more, *common(func, args))


def _promoted(args: Any) -> tuple[int, ...]:
    # aten/src/ATen/TensorIterator.cpp, promote_inputs_to_common_dtype: on the CPU, operands are cast to a common type.
    operands = [argument for argument in args if isinstance(argument, torch.Tensor)]
    if len(operands) < 2 or len({operand.dtype for operand in operands}) == 1:
        return ()
    common = operands[0].dtype
    for operand in operands[1:]:
        common = torch.result_type(torch.empty(1, dtype=common, device="meta"), operand) if operand.dim() else common
    return _converted(operands, common)


def _converted(operands: Any, dtype: torch.dtype) -> tuple[int, ...]:
    return tuple(operand.numel() * dtype.itemsize for operand in operands if operand.dtype != dtype)


def _splits(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    # aten/src/ATen/native/cpu/FlashAttentionKernel.cpp: blocks of 256, 64 or 32 queries and of 512 keys.
    # Sizes are [B, H, tokens, D].
    queries, keys = query.size(2), key.size(2)
    split = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(split, queries), min(512, keys)


def _flash(query: torch.Tensor, key: torch.Tensor) -> tuple[int, ...]:
    queries, keys = _splits(query, key)
    threads = torch.get_num_threads()
    floats = threads * (queries * keys + 2 * queries + queries * query.size(3))
    reduced = threads * queries * keys * query.itemsize if query.dtype in _REDUCED else 0
    return (4 * floats, reduced)


def _flash_backward(query: torch.Tensor, key: torch.Tensor) -> tuple[int, ...]:
    queries, keys = _splits(query, key)
    blocks = torch.get_num_threads() * 2 * queries * keys
    return (4 * blocks, blocks * query.itemsize if query.dtype in _REDUCED else 0)
