"""PyTorch's softmax kernels: their copies of tensors that are not contiguous, and what they read more than once."""

from __future__ import annotations

from typing import Any

import torch

from autotune.virtual.tensors import argument

_aten = torch.ops.aten
# aten/src/ATen/native/SoftMax.cpp, log_softmax_cpu_out, and native/cuda/SoftMax.cu, host_softmax: `input.contiguous()`.
# The kernels of the backward pass do so with the gradient and the output.
KERNELS = {
    _aten._softmax: 1,
    _aten._log_softmax: 1,
    _aten._softmax_backward_data: 2,
    _aten._log_softmax_backward_data: 2,
}
"""How many of its first arguments each kernel needs contiguous."""
_SHARED_BYTES = 48 << 10
"""Shared memory of a block of threads, which keeps a row for such a kernel (native/cuda/SoftMax.cu, host_softmax)."""


def contiguous_copies(func: Any, args: Any) -> tuple[int, ...]:
    """Return the bytes of each copy that a kernel makes; none for contiguous tensors."""
    needed = args[: KERNELS[func.overloadpacket]]
    return tuple(tensor.numel() * tensor.itemsize for tensor in needed if not tensor.is_contiguous())


def further_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """Return the bytes that a kernel on CUDA moves beside one pass over each of its tensors.

    These are its copies. A row that shared memory does not hold, as one over a vocabulary, is read for its maximum, for
    its sum and for the result (cunn_SoftMaxForward), and in the backward pass the gradient for its sum and for the
    result (cunn_SoftMaxBackward).
    """
    moved = 2 * sum(contiguous_copies(func, args))
    tensor, dim = args[0], argument(func, args, kwargs, "dim")
    if dim % (tensor.dim() or 1) == tensor.dim() - 1 and tensor.size(-1) * tensor.itemsize > _SHARED_BYTES:
        moved += (3 - KERNELS[func.overloadpacket]) * tensor.numel() * tensor.itemsize
    return moved
