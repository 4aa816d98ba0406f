"""Fake kernels for operators whose own fake kernels cannot run in a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_aten = torch.ops.aten


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


def _add_product(*others: Any, out: torch.Tensor, **more: Any) -> torch.Tensor:
    # The decomposition of PyTorch before 2.13 takes the type of the result for beta.
    return out


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
    str(_aten.addmm.dtype_out): _add_product,
    str(_aten._scaled_dot_product_cudnn_attention.default): _cudnn_attention,
}
"""Fake kernels by the operator's full name; called with the operator's arguments, under a fake tensor mode."""
