"""Workspaces that PyTorch's CPU and CUDA kernels have in common, and repeated reads of softmax kernels on CUDA."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autotune.virtual.operators.known import known
from autotune.virtual.recording.tensors import argument

_aten = torch.ops.aten
# aten/src/ATen/native/SoftMax.cpp, log_softmax_cpu_out, and native/cuda/SoftMax.cu, host_softmax: `input.contiguous()`.
# The backward kernels do this with the gradient and the output.
_SOFTMAX = {
    _aten._softmax: 1,
    _aten._log_softmax: 1,
    _aten._softmax_backward_data: 2,
    _aten._log_softmax_backward_data: 2,
}
# native/layer_norm.cpp and native/cuda/layer_norm_kernel.cu: `expect_contiguous()`, also on the gradient and the input.
_CONTIGUOUS = {
    **_SOFTMAX,
    _aten.native_layer_norm: 1,
    _aten.native_layer_norm_backward: 2,
    _aten._fused_rms_norm: 1,
    _aten._fused_rms_norm_backward: 2,
}
"""The number of leading arguments that each kernel makes contiguous."""
# native/TensorAdvancedIndexing.cpp, `expand_tensors` of IndexingUtils.h: the positions where a mask is true.
_INDEXED = frozenset({_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_})
# native/Loss.cpp: the losses of all elements, before their mean or sum.
_LOSSES = frozenset({_aten.mse_loss, _aten.smooth_l1_loss, _aten.huber_loss})
_SHARED_BYTES = 48 << 10
"""Shared memory of a thread block, in which softmax keeps a row (native/cuda/SoftMax.cu, host_softmax)."""


def common(func: Any, args: Any) -> tuple[int, ...]:
    """Return the bytes of the blocks that a kernel allocates and frees before it returns.

    Most are copies of non-contiguous tensors.
    """
    if func is _aten.multinomial.default and (args[1] == 1 or not any(args[2:3])):
        # native/Distributions.cpp: a random number for each probability.
        return (args[0].numel() * args[0].itemsize,)
    if func.overloadpacket in _LOSSES and argument(func, args, {}, "reduction") != 0:
        return (torch.broadcast_shapes(args[0].shape, args[1].shape).numel() * args[0].itemsize,)
    if func.overloadpacket in _INDEXED:
        masks = (index for index in args[1] if index is not None and index.dtype is torch.bool)
        return tuple(8 * mask.dim() * (selected(mask) or 0) for mask in masks)
    return copies(args[: _CONTIGUOUS.get(func.overloadpacket, 0)])


def copies(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Return the bytes of contiguous copies of the tensors that are not contiguous."""
    return tuple(tensor.numel() * tensor.itemsize for tensor in tensors if not tensor.is_contiguous())


def selected(mask: torch.Tensor) -> int | None:
    """Return the number of elements that a mask selects, or None if its values are unknown."""
    value = known(mask)
    if value is None:
        return None
    with _disable_current_modes():
        return int(value.sum())


def further_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """Return the bytes that a CUDA kernel moves in addition to one pass over each of its tensors.

    These are copies of non-contiguous tensors, and repeated reads of rows that do not fit shared memory, such as logits
    over a vocabulary: softmax reads a row for its maximum, for its sum and for the result (cunn_SoftMaxForward); the
    backward pass reads the gradient for its sum and for the result (cunn_SoftMaxBackward).
    """
    packet = func.overloadpacket
    moved = 2 * sum(common(func, args)) if packet in _CONTIGUOUS else 0
    if packet in _SOFTMAX:
        tensor, dim = args[0], argument(func, args, kwargs, "dim")
        if dim % (tensor.dim() or 1) == tensor.dim() - 1 and tensor.size(-1) * tensor.itemsize > _SHARED_BYTES:
            moved += (3 - _SOFTMAX[packet]) * tensor.numel() * tensor.itemsize
    return moved
