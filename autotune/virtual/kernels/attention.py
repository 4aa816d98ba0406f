"""Selects the fused operator of scaled dot product attention as CUDA does (aten/src/ATen/native/transformers)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from autotune.virtual.patches.autocast import cast
from autotune.virtual.recording.records import Capabilities, Capability
from autotune.virtual.recording.tensors import VIRTUAL

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
AMPERE = (8, 0)
# cuda/sdp_utils.cpp, check_head_dim_size_flash.
_MAX_FLASH_HEAD = 256
# The same file, check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120: on these GPUs, flash attention
# has no backward pass for head sizes in this range, nor with dropout above it.
_NO_FLASH_HEADS = (192, 224)
_NO_FLASH_CAPABILITIES = (((8, 6), (8, 9)), ((12, 0), (12, 1)))
# The same file, check_cudnn_tensor_shapes: the largest head size on every GPU that prefers cuDNN; a further supported
# pair of sizes (of queries and keys, of values); and the largest head size on Hopper. Since PyTorch 2.14, Blackwell
# supports the latter too, and both require this cuDNN version.
_MAX_CUDNN_HEAD_EVERYWHERE = 128
_UNEQUAL_CUDNN_HEADS = (192, 128)
_MAX_CUDNN_HEAD = 256
_LARGE_CUDNN_HEADS_FROM = 92201
# check_cudnn_d256_bprop_head_dim, since PyTorch 2.14: the only larger sizes with a backward pass.
_TRAINED_CUDNN_HEADS = (256, 256)
# The same file, check_prefer_cudnn_attention: the oldest cuDNN version and the GPUs.
_CUDNN_PREFERRED_FROM = 91501
_CUDNN_PREFERRED_ON = (9, 10)
# The wheels on PyPI depend on such a cuDNN: torch 2.11.0 requires nvidia-cudnn-cu13 9.19.0.56, 2.12.0 and 2.13.0
# require 9.20.0.48 (https://github.com/huggingface/transformers/pull/48163), 2.14.1 requires 9.24.0.43.
_CUDNN_OF_WHEELS = 92400 if torch.__version__ >= (2, 14) else 91900
# https://github.com/pytorch/pytorch/pull/191085: mem-efficient attention supports grouped-query attention.
_EFFICIENT_SHARES_KEYS = (2, 14)
# attention.cpp, pad_last_dim for flash, and mem-efficient attention's alignment of the mask.
_FLASH_ALIGNMENT = 8
_MASK_ALIGNMENT = 16
_CUDNN_ALIGNMENT = 8


def prefers_cudnn(capability: Capability) -> bool:
    """Return whether PyTorch tries cuDNN's attention first on a GPU (``cuda/sdp_utils.cpp``, ``priority_order``).

    A CPU build of PyTorch is treated like the PyPI wheel of the same release, which is built with CUDA 13.
    """
    major, minor = capability
    if major not in _CUDNN_PREFERRED_ON:
        return False
    if torch.version.cuda is not None and int(torch.version.cuda.split(".")[0]) < 13 and minor not in (0, 3):
        return False
    return _cudnn_version() >= _CUDNN_PREFERRED_FROM


def _cudnn_version() -> int:
    return _CUDNN_OF_WHEELS if torch.version.cuda is None else torch.backends.cudnn.version() or 0


def attention_as_on_cuda(gpus: Capabilities) -> AbstractContextManager[object]:
    """Patch ``scaled_dot_product_attention`` to call, on the virtual GPU, the operator that PyTorch calls on CUDA.

    Args:
        gpus: compute capabilities that select the operator.
    """
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
        if query.device.type != VIRTUAL:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if torch.is_autocast_enabled(VIRTUAL):
            query, key, value, attn_mask = cast((query, key, value, attn_mask), torch.get_autocast_dtype(VIRTUAL))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            zero, out = (torch.scalar_tensor(x, dtype=query.dtype, device=query.device) for x in (0.0, -torch.inf))
            attn_mask = torch.where(attn_mask, zero, out)
        arguments = query, key, value, attn_mask, dropout_p, is_causal
        kernel = gpus.decide(lambda capability: _kernel(*arguments, capability))
        if kernel is None:
            return _aten._scaled_dot_product_attention_math(*arguments, None, scale=scale, enable_gqa=enable_gqa)[0]
        return kernel(*arguments, scale)

    # torch.distributed.tensor.experimental.context_parallel patches the function by this name.
    attention.__name__ = "scaled_dot_product_attention"
    return mock.patch.object(functional, "scaled_dot_product_attention", attention)


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, capability: Capability
) -> Callable[..., Tensor] | None:
    """Return the function below for the first supported kernel; None selects the math implementation."""
    if prefers_cudnn(capability) and _cudnn_runs(q, k, v, mask, dropout_p, capability):
        return _cudnn
    if mask is None and _flash_runs(q, k, v, dropout_p, is_causal, capability):
        return _flash
    return _efficient if _efficient_runs(q, k, v, capability) else None


def _cudnn_runs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, capability: Capability) -> bool:
    # can_use_cudnn_attention of PyTorch 2.14. Sizes are [B, H, tokens, D].
    heads = q.size(-1), v.size(-1)
    return (
        q.dtype in _HALF
        and _cudnn_supports_heads(heads, capability, trained=_needs_gradient(q, k, v))
        and all(head % _CUDNN_ALIGNMENT == 0 for head in heads)
        and k.size(2) > 1
        and (mask is None or not mask.requires_grad)
        and float(dropout_p * 16).is_integer()
        and (dropout_p == 0.0 or q.size(2) > 1)
    )


def _cudnn_supports_heads(heads: tuple[int, int], capability: Capability, *, trained: bool) -> bool:
    if max(heads) <= _MAX_CUDNN_HEAD_EVERYWHERE or heads == _UNEQUAL_CUDNN_HEADS:
        return True
    if torch.__version__ < (2, 14):
        large = capability[0] == 9
    else:
        large = _cudnn_version() >= _LARGE_CUDNN_HEADS_FROM and (not trained or heads == _TRAINED_CUDNN_HEADS)
    return large and max(heads) <= _MAX_CUDNN_HEAD


def _flash_runs(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, capability: Capability) -> bool:
    # can_use_flash_attention.
    head = q.size(-1)
    low, high = _NO_FLASH_HEADS
    untrained = head > low and (head <= high or dropout_p > 0.0)
    untrained = untrained and any(first <= capability <= last for first, last in _NO_FLASH_CAPABILITIES)
    return (
        q.dtype in _HALF
        and capability >= AMPERE
        and head == v.size(-1) <= _MAX_FLASH_HEAD
        and not (is_causal and q.size(2) != k.size(2))
        and not (untrained and _needs_gradient(q, k, v))
    )


def _efficient_runs(q: Tensor, k: Tensor, v: Tensor, capability: Capability) -> bool:
    # can_use_mem_efficient_attention, and minimum_gemm_alignment for the heads.
    if q.size(1) != k.size(1) and torch.__version__ < _EFFICIENT_SHARES_KEYS:
        return False
    if capability >= AMPERE:
        alignment = 16 // q.itemsize
    else:
        alignment = 8 if q.dtype == torch.float16 and capability >= (7, 0) else 1
    types = (torch.float32, *_HALF) if capability >= AMPERE else (torch.float32, torch.float16)
    return q.dtype in types and q.size(-1) % alignment == 0 and v.size(-1) % alignment == 0


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _cudnn(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    if mask is not None:
        # cuda/attention.cu, _cudnn_attention_forward.
        mask = mask if mask.dim() == 4 else mask.unsqueeze(-3)
        mask = mask.expand(q.size(0), mask.size(-3), q.size(2), k.size(2))
    return _aten._scaled_dot_product_cudnn_attention(
        q, k, v, mask, _needs_gradient(q, k, v), dropout_p, is_causal, False, scale=scale
    )[0]


def _flash(q: Tensor, k: Tensor, v: Tensor, _: None, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
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
    return _aten._scaled_dot_product_efficient_attention(
        q, k, v, mask, _needs_gradient(q, k, v), dropout_p, is_causal, scale=scale
    )[0]
