"""Scaled dot product attention by CUDA's own rule for which fused operator runs (aten/src/ATen/native/transformers)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from autotune.virtual.autocast import cast

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
# cuda/sdp_utils.cpp, check_head_dim_size_flash.
_LARGEST_FLASH_HEAD = 256
# The same file, check_sm_version of use_flash_attention: Ampere and later.
_FLASH_CAPABILITY = (8, 0)
# attention.cpp, pad_last_dim for flash, and mem-efficient attention's alignment of the mask.
_FLASH_ALIGNMENT = 8
_MASK_ALIGNMENT = 16


@contextmanager
def attention_as_on_cuda(device_type: str, capability: tuple[int, int]) -> Iterator[None]:
    """Have ``scaled_dot_product_attention`` on a device run the operator that CUDA would run.

    cuDNN's attention, which PyTorch prefers on Hopper and Blackwell where it runs with cuDNN 9.15.1 or later, is not
    among them: what it takes for itself is decided inside cuDNN. Flash attention stands for it.
    """
    flash = capability >= _FLASH_CAPABILITY
    original = functional.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.device.type != device_type:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if torch.is_autocast_enabled(device_type):
            query, key, value, attn_mask = cast(
                (query, key, value, attn_mask), torch.get_autocast_dtype(device_type), device_type
            )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            zero, out = (torch.scalar_tensor(x, dtype=query.dtype, device=query.device) for x in (0.0, -torch.inf))
            attn_mask = torch.where(attn_mask, zero, out)
        if flash and attn_mask is None and query.dtype in _HALF and query.size(-1) <= _LARGEST_FLASH_HEAD:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if not enable_gqa or query.size(1) == key.size(1):
            return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
        return _aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    with mock.patch.object(functional, "scaled_dot_product_attention", attention):
        yield


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    head = q.size(-1)
    scale = head**-0.5 if scale is None else scale
    missing = -head % _FLASH_ALIGNMENT
    if missing:
        q, k, v = (functional.pad(tensor, (0, missing)) for tensor in (q, k, v))
    out = _aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :head] if missing else out


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    if mask is not None:
        missing = -mask.size(-1) % _MASK_ALIGNMENT
        if missing:
            mask = functional.pad(mask, (0, missing))[..., : mask.size(-1)]
        mask = mask.expand(q.size(0), q.size(1), q.size(2), k.size(2))
    needs_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return _aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, needs_gradient, dropout_p, is_causal, scale=scale
    )[0]
