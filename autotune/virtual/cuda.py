"""What CUDA's kernels take for themselves while they run, each rule with the source that has it."""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_backward.default


def scratch(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, ...]:
    """Return the bytes of the blocks that an operator's CUDA kernel allocates and frees before it returns."""
    if func is _FLASH_BACKWARD:
        return _flash_backward(args[1], args[2])
    return ()


def _flash_backward(query: torch.Tensor, key: torch.Tensor) -> tuple[int, ...]:
    # aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: softmax_d and dq_accum in float32, and
    # keys' and values' gradients for every query head where heads are grouped. Sizes are [B, H, tokens, D].
    batch, heads, tokens, head = query.shape
    rounded_tokens = -(-tokens // 128) * 128
    rounded_head = -(-head // 32) * 32 if head <= 192 else 256
    softmax_d = 4 * batch * heads * rounded_tokens
    dq_accum = softmax_d * rounded_head
    if heads == key.size(1):
        return (softmax_d, dq_accum)
    expanded = batch * heads * key.size(2) * head * key.itemsize
    return (softmax_d, dq_accum, expanded, expanded)
