"""Classifies operators that memory bounds by how they pass over their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from autotune.virtual.costs import Access
from autotune.virtual.tensors import operator_name

# By words in the names of PyTorch's operators and of Triton's kernels; the first that matches.
_BY_NAME = (
    (("dequantize", "4bit", "8bit_blockwise", "quantize"), Access.DEQUANTIZE),
    (("adam", "sgd", "lion", "adagrad", "adafactor", "_foreach"), Access.OPTIMIZER),
    (("embedding", "index", "gather", "scatter"), Access.GATHER),
    (("layer_norm", "rms_norm", "group_norm", "batch_norm"), Access.NORM),
    (("softmax", "nll_loss", "cross_entropy", "logsumexp"), Access.SOFTMAX),
    (("mean", "sum", "amax", "amin", "vector_norm", "var", "cumsum", "topk", "sort"), Access.REDUCTION),
)
# A tensor that is smaller than this share of the largest one stays in the cache.
_CACHED_SHARE = 1 / 16


def access_of(packet: Any, tensors: Sequence[torch.Tensor]) -> Access:
    """Return how an operator passes over its tensors on the device.

    Args:
        packet: the operator, such as ``torch.ops.aten.mul``.
        tensors: those on the device; only their metadata is read, so they may be fake.
    """
    named = access_by_name(operator_name(packet))
    if named is not None:
        return named
    most = max((tensor.numel() for tensor in tensors), default=0)
    large = (tensor for tensor in tensors if tensor.numel() > most * _CACHED_SHARE)
    return Access.POINTWISE if all(map(_dense, large)) else Access.STRIDED


@cache
def access_by_name(name: str) -> Access | None:
    """Return how an operator of that name passes over its tensors, or None where that depends on their strides."""
    return next((access for words, access in _BY_NAME if any(word in name for word in words)), None)


def _dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie one after another, in whatever order of dimensions."""
    reversed_order = tensor.transpose(0, -1) if tensor.dim() > 1 else tensor
    return bool(tensor.is_contiguous() or reversed_order.is_contiguous())
