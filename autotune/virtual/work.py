"""Computes the work of a dispatched operator: floating-point operations, bytes, and how it passes over its tensors."""

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

from autotune.virtual.costs import Access, Kind, Work
from autotune.virtual.tensors import argument, changes, operator_name, tensors_of, type_of_device
from autotune.virtual.workspaces import further_bytes

_aten = torch.ops.aten

# Operators that copy a value from the device to the host.
_READ_BY_HOST = frozenset({_aten._local_scalar_dense, _aten.equal, _aten.is_nonzero})
# Operators that only allocate; views are recognised by their tag, and metadata queries by writing nothing.
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
# The formulas take only the matrices; overloads with a dtype for the result have it among their positional arguments.
_ADDED_TO = 3
_MATRICES = {_aten.mm: 2, _aten.bmm: 2, _aten.addmm: _ADDED_TO, _aten.baddbmm: _ADDED_TO}
# PyTorch has formulas for the products that return a new tensor.
_IN_PLACE = {_aten.addmm_: _aten.addmm, _aten.baddbmm_: _aten.baddbmm}
# Products with quantised weights.
_WEIGHTS = frozenset({"bitsandbytes.gemm_4bit.default", "bitsandbytes.int8_linear_matmul.default"})

GROUPED = {
    "aten._grouped_mm.default": 1,
    "transformers.grouped_mm_fallback.default": 1,
    "transformers.grouped_mm_fallback_backward.default": 2,
}
"""Operators that multiply groups, as those of experts, and the products of each group."""

# By words in the names of PyTorch's operators and of Triton's kernels; the first that matches.
_BY_NAME = (
    (("dequantize", "4bit", "8bit_blockwise", "quantize"), Access.DEQUANTIZE),
    (("adam", "sgd", "lion", "adagrad", "adafactor", "_foreach"), Access.OPTIMIZER),
    (("embedding", "index", "gather", "scatter"), Access.GATHER),
    (("layer_norm", "rms_norm", "group_norm", "batch_norm"), Access.NORM),
    (("softmax", "nll_loss", "cross_entropy", "logsumexp"), Access.SOFTMAX),
    (("bmm",), Access.BATCHED),
    (("mean", "sum", "amax", "amin", "vector_norm", "var", "cumsum", "topk", "sort"), Access.REDUCTION),
)
# A tensor that is smaller than this share of the largest one stays in the cache.
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
        since: by the ``id`` of a tensor that a cache may hold, the bytes that were touched after its block.
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
    bytes_read, bytes_written = sum(map(_touched, read)), sum(map(_touched, written))
    if packet in _GATHERS:
        bytes_read -= max(0, _touched(inputs[0]) - bytes_written)
    elif packet in _SCATTERS:
        untouched = max(0, _touched(inputs[0]) - max(map(_touched, inputs[1:]), default=0))
        bytes_read, bytes_written = bytes_read - untouched, bytes_written - untouched
    elif func.namespace == "fsdp" and packet.__name__ == "all_gather_copy_in":
        # Of the buffer that it is given for the shards of all ranks, it writes its own.
        bytes_read = bytes_written = sum(map(_touched, args[0]))
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
    """Return :attr:`Work.reused`; of operators that touch only elements of a tensor, nothing is known."""
    if packet in _GATHERS or packet in _SCATTERS:
        return ()
    return tuple((_touched(tensor), since[id(tensor)]) for tensor in tensors if id(tensor) in since)


def _copy(func: Any, args: Any, kwargs: Any, written: torch.Tensor, device_type: str) -> Work:
    kind = Kind.TO_DEVICE if type_of_device(written) == device_type else Kind.TO_HOST
    nbytes = _touched(written)
    waits = not argument(func, args, kwargs, "non_blocking")
    return Work(kind, _dtype([written]), 0, nbytes, nbytes, waits)


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int | None:
    """Return the floating-point operations by PyTorch's own formula, or None where it has none.

    The formulas of attention count the whole square of tokens. With ``is_causal``, kernels skip the half above the
    diagonal, as does benchmarks/benchmark_flash_attention.py of https://github.com/Dao-AILab/flash-attention.
    """
    if operator_name(func) in _WEIGHTS:
        # A product with a quantised weight: every output is a sum over the input's last dimension.
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
    own = _with_all_heads(args) if "_scaled_dot_product_" in operator_name(func) else args
    flops = int(formula(*own, **kwargs, out_val=result))
    return flops // 2 if argument(func, args, kwargs, "is_causal") else flops


def _with_all_heads(args: Any) -> Any:
    """Return the arguments of PyTorch's attention with as many heads of keys and values as of queries, by their sizes.

    Every head of queries is multiplied with its keys, which several of them may share. The formulas of PyTorch 2.11
    refuse fewer heads of keys.
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
    """Return the operations of a product of groups, as those of experts; PyTorch has no formula.

    Groups are slices of one dimension: of rows, of columns, or of what is summed over. All of them together are as
    large as the dimension; only where both have a dimension of groups, each is a product of its own.
    """
    groups = a.size(0) if a.dim() == b.dim() == 3 else 1
    return int(2 * groups * a.size(-2) * a.size(-1) * b.size(-1))


def _multiplied(func: Any, args: Any, result: Any) -> list[torch.Tensor]:
    """Return tensors of the type that is multiplied, where the first argument may have another; else none.

    Half-precision matrices that are added up in float32 are multiplied by the tensor cores.
    """
    if operator_name(func) in _WEIGHTS:
        return [args[0]]
    return [args[1]] if _MATRICES.get(func.overloadpacket) == _ADDED_TO else []


def _kind(packet: Any) -> Kind:
    name = operator_name(packet)
    return Kind.ATTENTION if "attention" in name or "flash" in name else Kind.MATMUL


def _attention_kernel(func: Any, args: Any, kwargs: Any) -> str:
    """Return the name that `inspection/achieved.yaml` has of a kernel of attention; empty: as fast as FlashAttention 2.

    The memory-efficient kernel's share is that of 16-bit types: in float32, it splits numbers for the tensor cores.
    """
    if "cudnn" in operator_name(func):
        return "cudnn" if argument(func, args, kwargs, "attn_bias") is None else ""
    if "efficient" in operator_name(func):
        return "efficient" if argument(func, args, kwargs, "query").itemsize == 2 else ""
    return "flash_3" if (argument(func, args, kwargs, "version") or 0) >= 3 else ""


def _length(func: Any, args: Any, kwargs: Any) -> int:
    """Return the tokens of each row, [batch, heads, tokens, width]; of rows end to end, the longest.

    A row has as many queries as keys, but in decoding, where few queries pass over the keys of all tokens before them:
    the longer of both counts. Of kernels that PyTorch has no formula for, the pairs of queries and keys are known:
    causal rows of T tokens have T * T / 2 of them for T queries.
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


def _touched(tensor: torch.Tensor) -> int:
    """Return the bytes of memory that a pass over the tensor touches; an expanded dimension counts as one element."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0 or size == 0]
    return int(prod(sizes) * tensor.itemsize)


def _written(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operator allocated and those that it changed in place."""
    changed = [tensor for name in changes(func) for tensor in _tensors(argument(func, args, kwargs, name))]
    if argument(func, args, kwargs, "grad_scale") is None and "grads" in changes(func):
        # The fused optimizers write gradients back only where they unscale them.
        grads = {id(tensor) for tensor in _tensors(argument(func, args, kwargs, "grads"))}
        changed = [tensor for tensor in changed if id(tensor) not in grads]
    return (_tensors(result) if _returns_fresh(func) else []), changed


@cache
def _returns_fresh(func: Any) -> bool:
    """Return whether an operator's results are new tensors."""
    return all(value.alias_info is None for value in func._schema.returns)


def _access_of(packet: Any, tensors: Sequence[torch.Tensor]) -> Access:
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
    """Return whether a tensor's elements are contiguous, its first and last dimension in either order; it has some."""
    # By sizes and strides: `transpose` and `is_contiguous` take ten times as long on a fake tensor.
    sizes = [*zip(tensor.shape, tensor.stride(), strict=True)]
    return _contiguous(sizes) or _contiguous([sizes[-1], *sizes[1:-1], sizes[0]])


def _contiguous(sizes: Sequence[tuple[int, int]]) -> bool:
    """Return whether dimensions of these sizes and strides are contiguous."""
    expected = accumulate((size for size, _ in reversed(sizes)), mul, initial=1)
    return all(size == 1 or stride == own for (size, stride), own in zip(reversed(sizes), expected, strict=False))
