"""Computes the work of a dispatched operator: floating-point operations, bytes and memory access pattern."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from math import prod
from operator import mul
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from autotune.virtual.cost.roofline import Access, Kind, Work
from autotune.virtual.operators.workspaces import further_bytes
from autotune.virtual.recording.tensors import argument, mutated_arguments, operator_name, tensors_of, type_of_device

_aten = torch.ops.aten

# Operators that copy a value from the device to the host.
_READ_BY_HOST = frozenset({_aten._local_scalar_dense, _aten.equal, _aten.is_nonzero})
# Operators without a kernel, besides views, which have a tag, and metadata queries, which write nothing.
_NO_KERNEL = frozenset({
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten._unsafe_view,
    _aten.resize_, _aten.set_, _aten.record_stream, _aten.lift_fresh_copy,
})  # fmt: skip
# Operators that overwrite their first argument without reading it.
_OVERWRITES = frozenset({
    _aten.fill_, _aten.zero_, _aten.copy_, _aten.normal_, _aten.uniform_, _aten.bernoulli_, _aten.exponential_,
    _aten.random_, _aten._foreach_zero_, _aten._foreach_copy_,
})  # fmt: skip
# Operators that read only the elements of their first argument that they return.
_GATHERS = frozenset({_aten.embedding, _aten.index, _aten.index_select, _aten.gather, _aten._unsafe_index})
# Operators that change only the indexed elements of their first argument.
_SCATTERS = frozenset({
    _aten.index_put_, _aten._index_put_impl_, _aten.index_add_, _aten.index_copy_, _aten.scatter_, _aten.scatter_add_,
    _aten.masked_scatter_,
})  # fmt: skip
# Number of positional arguments of the FLOP formulas; the overloads with a result dtype pass it by position as well.
_WITH_ADDEND = 3
_MATRICES = {_aten.mm: 2, _aten.bmm: 2, _aten.addmm: _WITH_ADDEND, _aten.baddbmm: _WITH_ADDEND}
# PyTorch has FLOP formulas for the out-of-place products only.
_IN_PLACE = {_aten.addmm_: _aten.addmm, _aten.baddbmm_: _aten.baddbmm}
# Products with quantised weights.
_QUANTISED_PRODUCTS = frozenset({"bitsandbytes.gemm_4bit.default", "bitsandbytes.int8_linear_matmul.default"})

GROUPED = {
    "aten._grouped_mm.default": 1,
    "transformers.grouped_mm_fallback.default": 1,
    "transformers.grouped_mm_fallback_backward.default": 2,
}
"""Grouped matrix products, such as those of experts, with the number of products per group."""

# Access patterns by words in the names of PyTorch's operators and of Triton kernels; the first match counts.
_ACCESS_BY_NAME = (
    (("dequantize", "4bit", "8bit_blockwise", "quantize"), Access.DEQUANTIZE),
    (("adam", "sgd", "lion", "adagrad", "adafactor", "_foreach"), Access.OPTIMIZER),
    (("embedding", "index", "gather", "scatter"), Access.GATHER),
    (("layer_norm", "rms_norm", "group_norm", "batch_norm"), Access.NORM),
    (("softmax", "nll_loss", "cross_entropy", "logsumexp"), Access.SOFTMAX),
    (("bmm",), Access.BATCHED),
    (("mean", "sum", "amax", "amin", "vector_norm", "var", "cumsum", "topk", "sort"), Access.REDUCTION),
)
# A tensor smaller than this share of the largest one is assumed to stay in the cache.
_CACHED_SHARE = 1 / 16


def operator_work(
    func: Any,
    args: Any,
    kwargs: Any,
    result: Any,
    *,
    device_type: str,
    since: Mapping[int, int] = MappingProxyType({}),
) -> Work:
    """Return the work of one dispatched operator on the device.

    Args:
        func: the operator, such as ``torch.ops.aten.mm.default``.
        args: its positional arguments; only metadata of tensors is read, so they may be fake.
        kwargs: its named arguments.
        result: its return value.
        device_type: type of the target device; tensors on any other device count as host memory.
        since: by ``id`` of a tensor that may be in the L2 cache, the bytes of other blocks accessed since its last
            access.
    """
    packet = func.overloadpacket
    if packet in _READ_BY_HOST:
        return Work(Kind.SYNCHRONIZE) if type_of_device(args[0]) == device_type else Work(Kind.NOTHING)
    if func.is_view or packet in _NO_KERNEL:
        return Work(Kind.NOTHING)
    fresh, changed = _written(func, args, kwargs, result)
    written = fresh + changed
    inputs = _tensors((args, tuple(kwargs.values())))
    on_device = [tensor for tensor in (*inputs, *written) if type_of_device(tensor) == device_type]
    if not on_device or not written:
        return Work(Kind.NOTHING)
    if len(on_device) < len(inputs) + len(written) and packet in (_aten._to_copy, _aten.copy_):
        return _copy(func, args, kwargs, written[0], device_type)
    overwritten = {id(tensor) for tensor in changed} if packet in _OVERWRITES else set()
    read = [tensor for tensor in inputs if id(tensor) not in overwritten]
    bytes_read, bytes_written = sum(map(_accessed_bytes, read)), sum(map(_accessed_bytes, written))
    if packet in _GATHERS:
        bytes_read -= max(0, _accessed_bytes(inputs[0]) - bytes_written)
    elif packet in _SCATTERS:
        untouched = max(0, _accessed_bytes(inputs[0]) - max(map(_accessed_bytes, inputs[1:]), default=0))
        bytes_read, bytes_written = bytes_read - untouched, bytes_written - untouched
    elif func.namespace == "fsdp" and packet.__name__ == "all_gather_copy_in":
        # It writes only this rank's shard of its buffer, which holds the shards of all ranks.
        bytes_read = bytes_written = sum(map(_accessed_bytes, args[0]))
    bytes_read += further_bytes(func, args, kwargs)
    flops = _flops(func, args, kwargs, result)
    kind = _kind(packet) if flops is not None else Kind.ELEMENTWISE
    if flops is None:
        flops = max((tensor.numel() for tensor in on_device), default=0)
    return Work(
        kind,
        _dtype(_multiplied(func, args, result) or on_device),
        flops,
        bytes_read,
        bytes_written,
        reused=_reused(packet, (*read, *written), since),
        access=_access_of(packet, on_device),
        kernel=_attention_kernel(func, args, kwargs) if kind is Kind.ATTENTION else "",
        length=_length(func, args, kwargs) if kind is Kind.ATTENTION else 0,
        backward=kind is Kind.ATTENTION and "backward" in operator_name(packet),
    )


def _reused(packet: Any, tensors: Iterable[torch.Tensor], since: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """Return :attr:`Work.reused`; empty for operators that access only some elements of a tensor."""
    if packet in _GATHERS or packet in _SCATTERS:
        return ()
    return tuple((_accessed_bytes(tensor), since[id(tensor)]) for tensor in tensors if id(tensor) in since)


def _copy(func: Any, args: Any, kwargs: Any, written: torch.Tensor, device_type: str) -> Work:
    kind = Kind.TO_DEVICE if type_of_device(written) == device_type else Kind.TO_HOST
    nbytes = _accessed_bytes(written)
    waits = not argument(func, args, kwargs, "non_blocking")
    return Work(kind, _dtype([written]), 0, nbytes, nbytes, waits)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """Return the floating-point operations by PyTorch's formula, or None if it has none.

    The formulas for attention count all query-key pairs. With ``is_causal``, kernels skip the half above the diagonal,
    which is not counted, as in benchmarks/benchmark_flash_attention.py of https://github.com/Dao-AILab/flash-attention.
    """
    if operator_name(func) in _QUANTISED_PRODUCTS:
        # Each output is a sum over the input's last dimension.
        return int(2 * result.numel() * args[0].shape[-1])
    packet = _IN_PLACE.get(func.overloadpacket, func.overloadpacket)
    if (products := GROUPED.get(operator_name(func))) is not None:
        return products * _grouped_flops(args[0], args[1])
    formula = flop_registry.get(packet)
    if formula is None:
        return None
    matrices = _MATRICES.get(packet)
    if matrices is not None:
        return int(formula(*args[:matrices], out_val=result))
    formula_args = _with_all_heads(args) if "_scaled_dot_product_" in operator_name(func) else args
    flops = int(formula(*formula_args, **kwargs, out_val=result))
    return flops // 2 if argument(func, args, kwargs, "is_causal") else flops


def _with_all_heads(args: Any) -> Any:
    """Return the arguments of PyTorch's attention as shapes, with one key and value head per query head.

    With grouped-query attention, every query head is multiplied with its keys, which it may share. The formulas of
    PyTorch 2.11 raise for fewer key heads.
    """
    sizes = [value.shape for value in args if isinstance(value, torch.Tensor) and value.dim() == 4]
    heads = {size[1] for size in sizes}
    if len(heads) < 2:
        return args
    return [
        torch.Size((value.size(0), max(heads), *value.shape[2:]))
        if isinstance(value, torch.Tensor) and value.dim() == 4
        else value
        for value in args
    ]


def _grouped_flops(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return the floating-point operations of a grouped matrix product; PyTorch has no formula.

    If both operands are 3D, each group is a batched product. Otherwise groups are slices of one dimension (rows,
    columns or the summed one), which together cover it.
    """
    groups = a.size(0) if a.dim() == b.dim() == 3 else 1
    return int(2 * groups * a.size(-2) * a.size(-1) * b.size(-1))


def _multiplied(func: Any, args: Any, result: Any) -> list[torch.Tensor]:
    """Return a tensor with the compute dtype if the first argument may have another dtype; else an empty list.

    A product of half-precision matrices that accumulates into float32 runs on the tensor cores.
    """
    if operator_name(func) in _QUANTISED_PRODUCTS:
        return [args[0]]
    return [args[1]] if _MATRICES.get(func.overloadpacket) == _WITH_ADDEND else []


def _kind(packet: Any) -> Kind:
    name = operator_name(packet)
    return Kind.ATTENTION if "attention" in name or "flash" in name else Kind.MATMUL


def _attention_kernel(func: Any, args: Any, kwargs: Any) -> str:
    """Return the attention kernel's name in `inspection/achieved.yaml`; empty: the rate of FlashAttention 2.

    The memory-efficient kernel's rate is that of 16-bit dtypes: in float32, it splits numbers for the tensor cores.
    """
    if "cudnn" in operator_name(func):
        return "cudnn" if argument(func, args, kwargs, "attn_bias") is None else ""
    if "efficient" in operator_name(func):
        return "efficient" if argument(func, args, kwargs, "query").itemsize == 2 else ""
    return "flash_3" if (argument(func, args, kwargs, "version") or 0) >= 3 else ""


def _length(func: Any, args: Any, kwargs: Any) -> int:
    """Return the tokens per row of an attention operator; for concatenated rows, those of the longest.

    With PyTorch's operators ([batch, heads, tokens, width]), it is the larger of queries and keys: in decoding, few
    queries attend to many keys. For this package's operators, it follows from the query-key pairs: a causal row of T
    tokens has T * T / 2 pairs.
    """
    query, pairs = argument(func, args, kwargs, "q"), argument(func, args, kwargs, "pairs")
    if isinstance(query, torch.Tensor) and isinstance(pairs, int):
        per_query = query.size(-1) * query.size(1 if "flex" in operator_name(func) else -2)
        return int(2 * pairs * per_query // max(1, query.numel()))
    longest = argument(func, args, kwargs, "max_q")
    if isinstance(longest, int):
        return longest
    rows = (argument(func, args, kwargs, name) for name in ("query", "key"))
    return max((int(row.size(-2)) for row in rows if isinstance(row, torch.Tensor) and row.dim() == 4), default=0)


def _dtype(tensors: list[torch.Tensor]) -> str:
    floating = next((tensor for tensor in tensors if tensor.is_floating_point()), tensors[0])
    return str(floating.dtype).removeprefix("torch.")


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the distinct tensors among arguments or results; a tensor that is passed twice is read once."""
    return list({id(tensor): tensor for tensor in tensors_of(tree)}.values())


def _accessed_bytes(tensor: torch.Tensor) -> int:
    """Return the distinct bytes that a pass over the tensor accesses; an expanded dimension counts as one element."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0 or size == 0]
    return int(prod(sizes) * tensor.itemsize)


def _written(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operator allocated and those that it changed in place."""
    changed = [tensor for name in mutated_arguments(func) for tensor in _tensors(argument(func, args, kwargs, name))]
    if argument(func, args, kwargs, "grad_scale") is None and "grads" in mutated_arguments(func):
        # The fused optimizers write gradients back only where they unscale them.
        grads = {id(tensor) for tensor in _tensors(argument(func, args, kwargs, "grads"))}
        changed = [tensor for tensor in changed if id(tensor) not in grads]
    return (_tensors(result) if _returns_fresh(func) else []), changed


@cache
def _returns_fresh(func: Any) -> bool:
    """Return whether an operator's results are new tensors."""
    return all(value.alias_info is None for value in func._schema.returns)


def _access_of(packet: Any, tensors: Sequence[torch.Tensor]) -> Access:
    """Return the access pattern of an operator on the device.

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
    """Return the access pattern of an operator by its name, or None if it depends on strides."""
    return next((access for words, access in _ACCESS_BY_NAME if any(word in name for word in words)), None)


def _dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor with elements is contiguous, as it is or with first and last dimension swapped."""
    # `transpose` and `is_contiguous` take ten times as long on a fake tensor.
    sizes = [*zip(tensor.shape, tensor.stride(), strict=True)]
    return _contiguous(sizes) or _contiguous([sizes[-1], *sizes[1:-1], sizes[0]])


def _contiguous(sizes: Sequence[tuple[int, int]]) -> bool:
    """Return whether dimensions of these sizes and strides are contiguous."""
    expected = accumulate((size for size, _ in reversed(sizes)), mul, initial=1)
    return all(size == 1 or stride == packed for (size, stride), packed in zip(reversed(sizes), expected, strict=False))
