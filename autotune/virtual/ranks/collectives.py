"""The bytes that collective operators send, and the known values that they receive."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from autotune.virtual.costs import Kind, Work
from autotune.virtual.known import known
from autotune.virtual.links import Collective
from autotune.virtual.tensors import tensors_of

_C10D, _FUNCTIONAL = torch.ops.c10d, torch.ops._c10d_functional
# The share of its largest tensors that each of n ranks sends: the factors of NCCL's bus bandwidth, by which a time
# follows from the speed of the slowest link whatever the number of ranks
# (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
_TWICE = frozenset({
    _C10D.allreduce_, _C10D.allreduce_coalesced_, _FUNCTIONAL.all_reduce, _FUNCTIONAL.all_reduce_,
    _FUNCTIONAL.all_reduce_coalesced, _FUNCTIONAL.all_reduce_coalesced_,
})  # fmt: skip
_ONCE = frozenset({
    _C10D.allgather_, _C10D._allgather_base_, _C10D.allgather_coalesced_, _C10D.allgather_into_tensor_coalesced_,
    _C10D.reduce_scatter_, _C10D._reduce_scatter_base_, _C10D.reduce_scatter_tensor_coalesced_, _C10D.alltoall_,
    _C10D.alltoall_base_, _FUNCTIONAL.all_gather_into_tensor, _FUNCTIONAL.all_gather_into_tensor_out,
    _FUNCTIONAL.all_gather_into_tensor_coalesced, _FUNCTIONAL.reduce_scatter_tensor,
    _FUNCTIONAL.reduce_scatter_tensor_out, _FUNCTIONAL.reduce_scatter_tensor_coalesced, _FUNCTIONAL.all_to_all_single,
})  # fmt: skip
_WHOLE = frozenset({
    _C10D.broadcast_, _C10D.reduce_, _C10D.gather_, _C10D.scatter_, _C10D.send, _FUNCTIONAL.broadcast,
    _FUNCTIONAL.broadcast_,
})  # fmt: skip
# Operators after which a tensor has the values of another rank, or their mean or maximum.
_SAME = frozenset({_C10D.allreduce_, _C10D.broadcast_})
# Operators whose results may be known: what they receive is what this rank has.
_RECEIVED = _SAME | {_C10D.allgather_, _C10D._allgather_base_}


WRAPPERS: frozenset[type] = frozenset({DTensor, AsyncCollectiveTensor})
"""Kinds of tensors that consist of others; they first dispatch an operator on those themselves."""


def sent(func: Any, args: Any, kwargs: Any, result: Any, *, on_side_stream: bool) -> Work:
    """Return the work of a collective operator: the bytes that each rank sends, and which ranks these are.

    Args:
        func, args, kwargs, result: the operator, its arguments, and what it returned.
        on_side_stream: whether it runs on another than the default stream of the device.
    """
    ranks = _ranks(args)
    # One argument or the result is whole, and another one the part of it that a rank has.
    whole = max(map(_bytes, (*args, result)))
    size = round(whole * _share_sent(func.overloadpacket, args, len(ranks)))
    if not size or len(ranks) == 1:
        return Work(Kind.NOTHING)
    waits = not on_side_stream and not _is_asynchronous(func, args, kwargs)
    collective = Collective(ranks, all_reduce=func.overloadpacket in _TWICE)
    return Work(Kind.COMMUNICATION, bytes_read=size, bytes_written=size, waits=waits, collective=collective)


def received(func: Any, args: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the known tensors that an operator is about to change, each with its new values.

    Every rank is taken to have what this one has: the lengths of its micro-batches, for instance.
    """
    packet = func.overloadpacket
    # Leaving the modes takes longer than many an operator.
    if packet not in _RECEIVED:
        return []
    with _disable_current_modes():
        if packet in _SAME:
            return [(tensor, value.clone()) for tensor in args[0] if (value := known(tensor)) is not None]
        if packet is _C10D.allgather_ and (value := known(args[1][0])) is not None:
            return [(output, value.clone()) for output in args[0][0]]
        if packet is _C10D._allgather_base_ and (value := known(args[1])) is not None:
            return [(args[0], value.flatten().repeat(len(_ranks(args))).view(args[0].shape))]
    return []


def _share_sent(packet: Any, args: Any, ranks: int) -> float:
    """Return the share of the whole tensor that a rank sends.

    Context parallelism, for instance, passes gradients of keys and values on to the next rank by an exchange among all,
    in which the others get nothing.
    """
    if packet is _FUNCTIONAL.all_to_all_single:
        _, _, pieces, group = args
        if sum(pieces):
            return 1 - float(pieces[_resolve_process_group(group).rank()] / sum(pieces))
    return _ring_steps(packet, ranks) / ranks


def _ring_steps(packet: Any, ranks: int) -> int:
    """Return how many times each rank sends one of ``ranks`` equal pieces of the whole tensor."""
    if packet in _TWICE:
        return 2 * (ranks - 1)
    if packet in _ONCE:
        return ranks - 1
    return ranks if packet in _WHOLE else 0


def _ranks(args: Any) -> tuple[int, ...]:
    """Return the ranks of an operator's group, counted among all processes."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and argument._type().name() == "ProcessGroup":
            return _members(ProcessGroup.unbox(argument))
    # A functional collective names its group, as its last argument.
    return _members(_resolve_process_group(args[-1])) if isinstance(args[-1], str) else (0,)


def _members(group: ProcessGroup) -> tuple[int, ...]:
    return tuple(sorted(get_process_group_ranks(group)))


def _is_asynchronous(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the current stream goes on at once; a functional collective is waited for by an operator."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "async_op":
            given = args[position] if position < len(args) else kwargs.get("async_op", argument.default_value)
            return bool(given)
    return str(func.namespace) != "c10d"


def _bytes(tree: Any) -> int:
    return sum(int(tensor.numel() * tensor.itemsize) for tensor in tensors_of(tree))
