"""Copies by PyTorch's softmax kernels of tensors that are not contiguous, on the CPU and on CUDA."""

from __future__ import annotations

from typing import Any

import torch

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


def contiguous_copies(func: Any, args: Any) -> tuple[int, ...]:
    """Return the bytes of each copy that a kernel makes; none for contiguous tensors."""
    needed = args[: KERNELS[func.overloadpacket]]
    return tuple(tensor.numel() * tensor.itemsize for tensor in needed if not tensor.is_contiguous())
