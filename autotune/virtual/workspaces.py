"""Workspaces that PyTorch's kernels have on a CPU and on CUDA alike, and what those of softmax read more than once."""

from __future__ import annotations

from typing import Any

import torch

from autotune.virtual.tensors import argument

_aten = torch.ops.aten
# aten/src/ATen/native/SoftMax.cpp, log_softmax_cpu_out, and native/cuda/SoftMax.cu, host_softmax: `input.contiguous()`.
# The kernels of the backward pass do so with the gradient and the output.
_SOFTMAX = {
    _aten._softmax: 1,
    _aten._log_softmax: 1,
    _aten._softmax_backward_data: 2,
    _aten._log_softmax_backward_data: 2,
}
# native/layer_norm.cpp and native/cuda/layer_norm_kernel.cu: `expect_contiguous()`, of the gradient and the input too.
_CONTIGUOUS = {
    **_SOFTMAX,
    _aten.native_layer_norm: 1,
    _aten.native_layer_norm_backward: 2,
    _aten._fused_rms_norm: 1,
    _aten._fused_rms_norm_backward: 2,
}
"""How many of its first arguments each kernel needs contiguous."""
_SHARED_BYTES = 48 << 10
"""Shared memory of a block of threads, which keeps a row for softmax (native/cuda/SoftMax.cu, host_softmax)."""


def common(func: Any, args: Any) -> tuple[int, ...]:
    """Return the bytes of the blocks that a kernel allocates and frees before it returns.

    Most are copies of tensors that are not contiguous.
    """
    if func is _aten.multinomial.default and (args[1] == 1 or not any(args[2:3])):
        # native/Distributions.cpp: a random number for each probability.
        return (args[0].numel() * args[0].itemsize,)
    needed = args[: _CONTIGUOUS.get(func.overloadpacket, 0)]
    return tuple(tensor.numel() * tensor.itemsize for tensor in needed if not tensor.is_contiguous())


def further_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """Return the bytes that a kernel on CUDA moves beside one pass over each of its tensors.

    These are its copies of tensors that are not contiguous. A row that shared memory does not hold, as one over a
    vocabulary, is read by softmax for its maximum, for its sum and for the result (cunn_SoftMaxForward), and in the
    backward pass the gradient for its sum and for the result (cunn_SoftMaxBackward).
    """
    packet = func.overloadpacket
    moved = 2 * sum(common(func, args)) if packet in _CONTIGUOUS else 0
    if packet in _SOFTMAX:
        tensor, dim = args[0], argument(func, args, kwargs, "dim")
        if dim % (tensor.dim() or 1) == tensor.dim() - 1 and tensor.size(-1) * tensor.itemsize > _SHARED_BYTES:
            moved += (3 - _SOFTMAX[packet]) * tensor.numel() * tensor.itemsize
    return moved
