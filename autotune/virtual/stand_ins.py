"""Replaces operators that a trace cannot run as dispatched by fake kernels or by their composite implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from autotune.virtual.known import Knowledge, set_known
from autotune.virtual.tensors import operator_name

_aten = torch.ops.aten
_KEYS = torch._C.DispatchKey
_TRUE = torch.tensor(True)
_ATEN = {
    _aten._safe_softmax.default: _KEYS.CompositeExplicitAutograd,
    _aten.softmax.int: _KEYS.CompositeImplicitAutograd,
    _aten.isinf.default: _KEYS.CompositeExplicitAutograd,
    _aten.to.dtype: _KEYS.CompositeImplicitAutograd,
    _aten.logsumexp.default: _KEYS.CompositeExplicitAutograd,
    _aten.logsumexp.out: _KEYS.CompositeExplicitAutogradNonFunctional,
}
"""Operators that are composites on every device, with the dispatch key of the composite."""


def _int8_vectorwise_quant(knowledge: Knowledge, tensor: torch.Tensor, threshold: float = 0.0) -> tuple[Any, ...]:
    # bitsandbytes/backends/cuda/ops.py. Which columns have outliers depends on values, and a product saves a copy of
    # these columns: half of the columns are assumed to have outliers, the middle of the range.
    rows, columns = tensor.shape[:-1].numel(), tensor.shape[-1]
    scales = tensor.new_empty(rows, dtype=torch.float32)
    values = tensor.new_empty(tensor.shape, dtype=torch.int8)
    found = None
    if threshold > 0.0:
        outliers = tensor.abs() >= threshold
        some = outliers.any()
        set_known(some, _TRUE)
        # bitsandbytes reads this value on the host.
        _aten._local_scalar_dense(some)
        knowledge.assume(
            "half of the columns that are multiplied in 8 bits have an outlier, so that a copy is kept; none or all may"
        )
        outliers.any(dim=0)
        found = torch.arange(columns // 2, device=tensor.device)
    # Represents bitsandbytes' quantisation kernel.
    values.copy_(tensor)
    if rows > 1 and found is not None:
        values[:, found] = 0
    return values, scales, found


_BITSANDBYTES = frozenset(
    f"bitsandbytes.{name}.default"
    for name in ("gemm_4bit", "int8_mixed_scaled_mm", "int8_scaled_mm", "int8_vectorwise_dequant")
)
"""bitsandbytes/backends/default/ops.py: composites on GPUs too."""
_UPDATES = frozenset(f"bitsandbytes.optimizer_update_{bits}.default" for bits in ("32bit", "8bit_blockwise"))
"""bitsandbytes/backends/cpu/ops.py: composites on the CPU alone; their second argument is a gradient."""
_PRODUCT_IN_4_BITS, _MOST_ROWS_IN_4_BITS = "bitsandbytes.gemm_4bit.default", 512
"""bitsandbytes/backends/cuda/ops.py: with more rows, the weight is dequantised first, unless it is small; with fewer, a
kernel may multiply the 4-bit weight directly."""
_KEEPS_OUTLIERS = "bitsandbytes.int8_mixed_scaled_mm.default"
_OURS = {"bitsandbytes.int8_vectorwise_quant.default": _int8_vectorwise_quant}


def composite(func: Any, args: Any) -> Callable[..., Any] | None:
    """Return the composite implementation of an operator, or None if the device has a kernel for it.

    The result is called with :class:`Knowledge` and the operator's arguments.
    """
    composed = _composite(func)
    if operator_name(func) in _UPDATES and args[1].device.type == "cpu":
        return _registered(func, _KEYS.CPU)
    if composed is None or operator_name(func) != _PRODUCT_IN_4_BITS:
        return composed
    return composed if args[0].numel() > _MOST_ROWS_IN_4_BITS * args[0].shape[-1] else None


@cache
def _composite(func: Any) -> Callable[..., Any] | None:
    if func.namespace != "bitsandbytes":
        key = _ATEN.get(func)
        return None if key is None else _registered(func, key)
    name = operator_name(func)
    return _registered(func, _KEYS.CompositeExplicitAutograd) if name in _BITSANDBYTES else _OURS.get(name)


def kept_outliers(func: Any, result: Any) -> torch.Tensor | None:
    """Return the outlier columns that an 8-bit product saves for backward; None for any other operator."""
    found: torch.Tensor | None = result[1] if operator_name(func) == _KEEPS_OUTLIERS else None
    return found


def _registered(func: Any, key: Any) -> Callable[..., Any]:
    return lambda _, *args, **kwargs: func._op_dk(key, *args, **kwargs)


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    # PyTorch's meta kernel accepts only bfloat16; the CPU's accepts every type. Rows are padded to 16 bytes as in
    # create_grouped_gemm_output_tensor of aten/src/ATen/native/GroupedMMUtils.h.
    groups = offs.numel() if offs is not None else 0
    batch = [groups] if a.dim() == b.dim() == 2 else [a.size(0)] if a.dim() == b.dim() == 3 else []
    rows, columns = a.size(-2), b.size(-1)
    dtype = out_dtype or a.dtype
    step = 16 // dtype.itemsize
    padded = -(-columns // step) * step
    strides = [rows * padded, padded, 1] if batch else [padded, 1]
    return torch.empty_strided([*batch, rows, columns], strides, dtype=dtype, device=a.device)


def _cudnn_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    *others: Any,
    **more: Any,
) -> tuple[Any, ...]:
    # aten/src/ATen/native/cudnn/MHA.cpp, run_cudnn_SDP_fprop, and transformers/cuda/attention.cu,
    # _cudnn_attention_forward, which copies the generator's state to the device, with or without dropout.
    # Sizes are [B, H, tokens, D].
    order = sorted(range(4), key=lambda dimension: -query.stride(dimension))
    sizes = (*query.shape[:3], value.size(3))
    out = torch.empty_permuted(sizes, order, dtype=query.dtype, device=query.device)
    lse = query.new_empty((*query.shape[:3], 1) if compute_log_sumexp else 0, dtype=torch.float32)
    seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
    return out, lse, None, None, query.size(2), key.size(2), seed, offset, None


STAND_INS: Mapping[str, Callable[..., Any]] = {
    str(_aten._grouped_mm.default): _grouped_mm,
    # Before PyTorch 2.13, the decomposition passes the result dtype as beta.
    str(_aten.addmm.dtype_out): lambda *others, out, **more: out,
    str(_aten._scaled_dot_product_cudnn_attention.default): _cudnn_attention,
    # PyTorch's fake kernel returns a new tensor instead of its argument.
    str(torch.ops._c10d_functional.wait_tensor.default): lambda waited: waited,
}
"""Fake kernels by the operator's full name; called with the operator's arguments, under a fake tensor mode."""
