"""Replaces operators that a trace cannot run as dispatched by fake kernels or by their composite implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from autotune.virtual.operators.known import Knowledge, set_known
from autotune.virtual.recording.tensors import VIRTUAL, operator_name, type_of_device

_aten = torch.ops.aten
_KEYS = torch._C.DispatchKey
_TRUE = torch.tensor(True)
_ATEN = frozenset({
    _aten._safe_softmax.default, _aten.softmax.int, _aten.isinf.default, _aten.to.dtype, _aten.logsumexp.default,
    _aten.logsumexp.out, _aten.soft_margin_loss.default, _aten.soft_margin_loss.out,
    _aten.soft_margin_loss_backward.default, _aten.soft_margin_loss_backward.grad_input, _aten._trilinear.default,
    # Below autograd these arrive whole, as in bitsandbytes' product with a weight in 4 bits.
    _aten.linear.default, _aten.matmul.default,
})  # fmt: skip
"""Operators that are composites of several kernels on every device."""
_COMPOSITE = (
    _KEYS.CompositeExplicitAutograd, _KEYS.CompositeExplicitAutogradNonFunctional, _KEYS.CompositeImplicitAutograd,
)  # fmt: skip


def _int8_vectorwise_quant(knowledge: Knowledge, tensor: torch.Tensor, threshold: float = 0.0) -> tuple[Any, ...]:
    # bitsandbytes/backends/cuda/ops.py. Which columns have outliers depends on values, and a product saves a copy of
    # these columns: half of the columns are assumed to have outliers, the middle of the range.
    rows, columns = tensor.shape[:-1].numel(), tensor.shape[-1]
    scales = tensor.new_empty(rows, dtype=torch.float32)
    values = tensor.new_empty(tensor.shape, dtype=torch.int8)
    found = None
    if threshold > 0.0:
        outliers = tensor.abs() >= threshold
        some = outliers.any()
        set_known(some, _TRUE)
        # bitsandbytes reads this value on the host.
        _aten._local_scalar_dense(some)
        knowledge.assume(
            "half of the columns that are multiplied in 8 bits have an outlier, so that a copy is kept; none or all may"
        )
        outliers.any(dim=0)
        found = torch.arange(columns // 2, device=tensor.device)
    # Represents bitsandbytes' quantisation kernel.
    values.copy_(tensor)
    if rows > 1 and found is not None:
        values[:, found] = 0
    return values, scales, found


_BITSANDBYTES = frozenset(
    f"bitsandbytes.{name}.default"
    for name in ("gemm_4bit", "int8_mixed_scaled_mm", "int8_scaled_mm", "int8_vectorwise_dequant")
)
"""bitsandbytes/backends/default/ops.py: composites on GPUs too."""
_UPDATES = frozenset(f"bitsandbytes.optimizer_update_{bits}.default" for bits in ("32bit", "8bit_blockwise"))
"""bitsandbytes/backends/cpu/ops.py: composites on the CPU alone; their second argument is a gradient."""
_PRODUCT_IN_4_BITS, _MAX_ROWS_IN_4_BITS = "bitsandbytes.gemm_4bit.default", 512
"""bitsandbytes/backends/cuda/ops.py: with more rows, the weight is dequantised first, unless it is small; with fewer, a
kernel may multiply the 4-bit weight directly."""
KEEPS_OUTLIERS = "bitsandbytes.int8_mixed_scaled_mm.default"
"""The product in 8 bits; its second result are the outlier columns that it saves for the backward pass, or None."""
_OURS = {"bitsandbytes.int8_vectorwise_quant.default": _int8_vectorwise_quant}


def composite(func: Any, args: Any) -> Callable[..., Any] | None:
    """Return the composite implementation of an operator, or None if the device has a kernel for it.

    The result is called with :class:`Knowledge` and the operator's arguments.
    """
    composed = _composite(func)
    if operator_name(func) in _UPDATES and args[1].device.type == "cpu":
        return _registered(func, _KEYS.CPU)
    if composed is None or operator_name(func) != _PRODUCT_IN_4_BITS:
        return composed
    return composed if args[0].numel() > _MAX_ROWS_IN_4_BITS * args[0].shape[-1] else None


@cache
def _composite(func: Any) -> Callable[..., Any] | None:
    if func in _ATEN:
        return _registered(func, next(key for key in _COMPOSITE if func.has_kernel_for_dispatch_key(key)))
    name = operator_name(func)
    return _registered(func, _KEYS.CompositeExplicitAutograd) if name in _BITSANDBYTES else _OURS.get(name)


def _registered(func: Any, key: Any) -> Callable[..., Any]:
    return lambda _, *args, **kwargs: func._op_dk(key, *args, **kwargs)


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


def _loss(given: torch.Tensor, target: torch.Tensor, reduction: int = 1, *others: Any) -> torch.Tensor:
    # aten/src/ATen/native/BinaryOps.cpp and Loss.cpp, TORCH_META_FUNC: the result is allocated for the losses of all
    # elements and then resized to their mean or sum, which frees nothing.
    losses = given.new_empty(torch.broadcast_shapes(given.shape, target.shape))
    return losses.resize_(()) if reduction else losses


def _cross_entropy(
    given: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = 1
) -> torch.Tensor:
    # aten/src/ATen/native/cuda/Loss.cu, binary_cross_entropy_cuda: the losses are resized as well.
    kept = type_of_device(given) == VIRTUAL or not reduction
    return _loss(given, target, reduction) if kept else given.new_empty(())


def _log_sigmoid(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # aten/src/ATen/native/cuda/Activation.cpp, log_sigmoid_forward_cuda: the buffer is the CPU's alone.
    buffer = given.new_empty(0) if type_of_device(given) == VIRTUAL else torch.empty_like(given)
    return torch.empty_like(given), buffer


_STAND_INS: Mapping[str, Callable[..., Any]] = {
    str(_aten._grouped_mm.default): _grouped_mm,
    # Before PyTorch 2.13, the decomposition passes the result dtype as beta.
    str(_aten.addmm.dtype_out): lambda *others, out, **more: out,
    str(_aten._scaled_dot_product_cudnn_attention.default): _cudnn_attention,
    str(_aten.log_sigmoid_forward.default): _log_sigmoid,
    str(_aten.mse_loss.default): _loss,
    str(_aten.smooth_l1_loss.default): _loss,
    str(_aten.binary_cross_entropy.default): _cross_entropy,
    # PyTorch has no shape functions for these.
    **dict.fromkeys(
        map(str, (_aten.multi_margin_loss_backward.default, _aten.multilabel_margin_loss_backward.default)),
        lambda gradient, given, *others: torch.empty_like(given, memory_format=torch.contiguous_format),
    ),
    # PyTorch's fake kernel returns a new tensor instead of its argument.
    str(torch.ops._c10d_functional.wait_tensor.default): lambda waited: waited,
}
"""Fake kernels by the operator's full name; called with the operator's arguments, under a fake tensor mode."""


@cache
def stand_in_of(func: Any) -> Callable[..., Any] | None:
    """Return the fake kernel that replaces PyTorch's, or None: those above, and one for operators that return nothing.

    PyTorch has no fake kernels for some of the latter, such as fused SGD.
    """
    if not func._schema.returns and not func.has_kernel_for_dispatch_key(_KEYS.Meta):
        return lambda *args, **kwargs: None
    return _STAND_INS.get(operator_name(func))
