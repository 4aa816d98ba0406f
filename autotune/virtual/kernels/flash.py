"""FlashAttention 2, 3 and 4 in a trace: replaces the packages' functions by ones with the kernels' allocations."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from autotune.virtual.operators.custom import define_operators
from autotune.virtual.operators.known import known
from autotune.virtual.patches.libraries import Patches

# TRL's selective checkpointing saves the results of operators with "flash_attn" in their names
# (trl/models/selective_activation_checkpointing.py). FlashAttention 4 registers no operators, so its name has none.
_NAMESPACES = {2: "autotune_flash_attn", 3: "autotune_flash_attn", 4: "autotune_flash_cute"}
BACKWARD = frozenset(f"{namespace}.backward.default" for namespace in _NAMESPACES.values())
"""Full names of the backward operators."""
# transformers' names of the implementations, with the version of FlashAttention.
_NAME = re.compile(r"(?:flash_attention_|kernels-community/(?:vllm-)?flash-attn)([234])")
# The function with which transformers calls them.
_ATTEND = "_flash_attention_forward"
# Heads are padded to a multiple of 8 (flash_attn/flash_attn_interface.py, FlashAttnVarlenFunc).
_HEAD_ALIGNMENT = 8


def flash_attention_installed() -> Patches:
    """Patch transformers to report FlashAttention as installed and to use the functions of this module."""
    module = sys.modules.get("transformers.modeling_flash_attention_utils")
    if module is None:
        return
    from transformers import PreTrainedModel

    real: Callable[..., Any] = module._lazy_imports

    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        named = _NAME.fullmatch(str(implementation))
        if named is None:
            return real(implementation, *args, **kwargs)
        version = int(named[1])
        _register(str(implementation))
        fixed, varlen = partial(_fixed, version), partial(_varlen, version)
        return fixed, varlen, None, module._pad_input, module._unpad_input

    patched = ExitStack()

    def installed(model: Any, *args: Any, **kwargs: Any) -> None:
        # Some modeling files import this name only if a FlashAttention package is installed.
        file = sys.modules[type(model).__module__]
        if not hasattr(file, _ATTEND):
            patched.enter_context(mock.patch.object(file, _ATTEND, getattr(module, _ATTEND), create=True))

    yield patched
    yield mock.patch.object(module, "_lazy_imports", lazy_imports)
    yield mock.patch.object(module, "_loaded_implementation", None)
    yield mock.patch.object(PreTrainedModel, "_flash_attn_import_error", installed)


def _register(implementation: str) -> None:
    """Register a kernel of the Hub as transformers does after loading it."""
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if implementation not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        ALL_ATTENTION_FUNCTIONS.register(implementation, flash_attention_forward)
        ALL_MASK_ATTENTION_FUNCTIONS.register(implementation, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])


def _fixed(
    version: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **_: Any,
) -> Tensor:
    """``flash_attn_func``: rows of equal length; tensors are [batch, tokens, heads, head]."""
    pairs = q.size(0) * _pairs(q.size(1), k.size(1), window_size)
    # A single query, as in decoding, attends to all keys despite the causal mask.
    return _attend(q, k, v, pairs // 2 if causal and q.size(1) > 1 else pairs, 1, version)


def _varlen(
    version: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """``flash_attn_varlen_func``: concatenated documents; tensors are [tokens, heads, head].

    transformers inspects the parameter names (``_lazy_define_process_function``) and passes only these.
    """
    bounds = known(cu_seqlens_q)
    if bounds is None:
        lengths = [q.size(0) // (cu_seqlens_q.numel() - 1)] * (cu_seqlens_q.numel() - 1)
    else:
        values = bounds.tolist()
        lengths = [end - start for start, end in pairwise(values)]
    pairs = sum(_pairs(length, length, window_size) for length in lengths)
    return _attend(q, k, v, pairs // 2 if causal else pairs, len(lengths), version)


def _pairs(queries: int, keys: int, window: tuple[int, int]) -> int:
    """Return the number of query-key pairs in the window, before a causal mask."""
    return queries * (keys if window[0] < 0 else min(keys, window[0] + window[1] + 1))


def _attend(q: Tensor, k: Tensor, v: Tensor, pairs: int, documents: int, version: int) -> Tensor:
    head = q.size(-1)
    missing = -head % _HEAD_ALIGNMENT
    if missing:
        q, k, v = (functional.pad(tensor, (0, missing)) for tensor in (q, k, v))
    out: Tensor = _Flash.apply(q, k, v, pairs, documents, version)
    return out[..., :head] if missing else out


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pairs: int, documents: int, version: int) -> Tensor:
        q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
        out, lse, rng_state = _operators(version).forward(q, k, v, pairs, version)
        ctx.save_for_backward(q, k, v, out, lse, rng_state)
        ctx.sizes = pairs, documents, version
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, out, lse, _ = ctx.saved_tensors
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        dq, dk, dv = _operators(ctx.sizes[-1]).backward(dout, q, k, v, out, lse, *ctx.sizes)
        return dq, dk, dv, None, None, None


def _operators(version: int) -> Any:
    return getattr(torch.ops, _NAMESPACES[version])


def _forward(q: Tensor, k: Tensor, v: Tensor, pairs: int, version: int) -> tuple[Tensor, Tensor, Tensor]:
    # csrc/flash_attn/flash_api.cpp, mha_fwd and mha_varlen_fwd (FlashAttention 2), hopper/flash_api.cpp, mha_fwd (3),
    # and flash_attn/cute/interface.py, _flash_attn_fwd (4): in addition to the output, a float32 softmax_lse per query
    # and head, and in (2) two integers of random state.
    queries = q.shape[:-2].numel()
    lse = q.new_empty(q.size(-2) * queries, dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(2 if version == 2 else 0, dtype=torch.int64)


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, pairs: int, documents: int, version: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int pairs, int documents, int version)"
    " -> (Tensor, Tensor, Tensor)"
)
_FORWARD = "(Tensor q, Tensor k, Tensor v, int pairs, int version) -> (Tensor, Tensor, Tensor)"
_LIBRARIES = [
    define_operators(namespace, (_FORWARD, _forward), (_BACKWARD, _backward), heads=-2)
    for namespace in sorted(set(_NAMESPACES.values()))
]


def backward_workspace(query: Tensor, key: Tensor, documents: int, version: int) -> tuple[int, ...]:
    """Return the sizes in bytes of the backward pass's workspaces.

    FlashAttention 2 (csrc/flash_attn/flash_api.cpp, mha_bwd and mha_varlen_bwd): float32 softmax_d and dq_accum; with
    grouped-query attention, the gradients of keys and values per query head. FlashAttention 3 (hopper/flash_api.cpp,
    mha_bwd): also softmax_lse_log2; with grouped-query attention, the gradients of keys and values in float32.
    FlashAttention 4 (flash_attn/cute/interface.py, _flash_attn_bwd): as 3, with its block sizes on Blackwell.
    """
    heads, head = query.size(-2), query.size(-1)
    keys = key.shape[:-2].numel()
    if version == 2:
        padded = _padded(query, documents, 128)
        rounded = -(-head // 32) * 32 if head <= 192 else 256
        blocks: tuple[int, ...] = (4 * heads * padded, 4 * heads * padded * rounded)
        expanded = heads * keys * head * key.itemsize
    elif version == 4:
        rounded = -(-head // 32) * 32
        padded = _padded(query, documents, 128)
        blocks = (4 * heads * padded * rounded, 4 * heads * padded, 4 * heads * padded)
        expanded = 4 * key.size(-2) * _padded(key, documents, 256 if head >= 128 else 128) * rounded
    else:
        rounded = next(size for size in (64, 96, 128, 192, 256) if head <= size)
        padded = _padded(query, documents, 128 if rounded <= 64 else 64)
        blocks = (4 * heads * padded, 4 * heads * padded, 4 * heads * padded * rounded)
        expanded = 4 * key.size(-2) * _padded(key, documents, 128 if rounded <= 128 else 96) * rounded
    return blocks if heads == key.size(-2) else (*blocks, expanded, expanded)


def _padded(tensor: Tensor, documents: int, step: int) -> int:
    """Return the number of tokens after padding every row, or all documents together, to whole blocks."""
    rows = int(tensor.size(0)) if tensor.dim() == 4 else 1
    tokens = int(tensor.size(1) if tensor.dim() == 4 else tensor.size(0) + step * documents)
    return rows * -(-tokens // step) * step
