"""Bytes sent by collective operators, and known values of their results."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from autotune.virtual.cost.links import Collective
from autotune.virtual.cost.roofline import Kind, Work
from autotune.virtual.operators.known import known
from autotune.virtual.recording.tensors import tensors_of

_C10D, _FUNCTIONAL = torch.ops.c10d, torch.ops._c10d_functional
_ALL_REDUCE = "allreduce", "all_reduce"
# Operators that write another rank's values, or a reduction over ranks, into a tensor of the same shape.
_SAME = frozenset({_C10D.allreduce_, _C10D.broadcast_})
# Operators with known results, assuming that all ranks have this rank's values.
_RECEIVED = _SAME | {_C10D.allgather_, _C10D._allgather_base_}


WRAPPERS: frozenset[type] = frozenset({DTensor, AsyncCollectiveTensor})
"""Wrapper subclasses, which redispatch an operator on their inner tensors."""


def sent(func: Any, args: Any, kwargs: Any, result: Any, *, on_side_stream: bool) -> Work:
    """Return the work of a collective operator: bytes that each rank sends, and the participating ranks.

    Args:
        func, args, kwargs, result: the operator, its arguments and its result.
        on_side_stream: whether it runs on a stream other than the default one.
    """
    ranks = _ranks(args)
    # The largest argument or result is the whole tensor; another one may be a rank's shard of it.
    whole = max(map(_bytes, (*args, result)))
    size = round(whole * _share_sent(func.overloadpacket, args, len(ranks)))
    if not size or len(ranks) == 1:
        return Work(Kind.NOTHING)
    waits = not on_side_stream and not _is_asynchronous(func, args, kwargs)
    collective = Collective(ranks, all_reduce=func.overloadpacket.__name__.startswith(_ALL_REDUCE))
    return Work(Kind.COMMUNICATION, bytes_read=size, bytes_written=size, waits=waits, collective=collective)


def received(func: Any, args: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the tensors that an operator is about to write known values to, each with these values.

    Every rank is assumed to have this rank's values, such as the lengths of its micro-batches.
    """
    packet = func.overloadpacket
    # Disabling the modes takes longer than many operators.
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

    Uneven all-to-alls count by their splits: context parallelism uses one to send gradients of keys and values to the
    next rank only.
    """
    if packet is _FUNCTIONAL.all_to_all_single:
        _, _, pieces, group = args
        if sum(pieces):
            return 1 - float(pieces[_resolve_process_group(group).rank()] / sum(pieces))
    return _ring_steps(packet, ranks) / ranks


def _ring_steps(packet: Any, ranks: int) -> int:
    """Return the number of sends per rank, each of one of ``ranks`` equal pieces of the whole tensor."""
    # Divided by the ranks, the factors of https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
    name = packet.__name__.lstrip("_")
    if name.startswith(_ALL_REDUCE):
        return 2 * (ranks - 1)
    if name.startswith(("allgather", "all_gather", "reduce_scatter", "alltoall", "all_to_all")):
        return ranks - 1
    return ranks if name.startswith(("broadcast", "reduce", "gather", "scatter", "send")) else 0


def _ranks(args: Any) -> tuple[int, ...]:
    """Return the global ranks of an operator's group."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject) and argument._type().name() == "ProcessGroup":
            return _members(ProcessGroup.unbox(argument))
    # A functional collective has the name of its group as its last argument.
    return _members(_resolve_process_group(args[-1])) if isinstance(args[-1], str) else (0,)


def _members(group: ProcessGroup) -> tuple[int, ...]:
    return tuple(sorted(get_process_group_ranks(group)))


def _is_asynchronous(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the current stream does not wait; for functional collectives, ``wait_tensor`` does later."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "async_op":
            given = args[position] if position < len(args) else kwargs.get("async_op", argument.default_value)
            return bool(given)
    return str(func.namespace) != "c10d"


def _bytes(tree: Any) -> int:
    return sum(int(tensor.numel() * tensor.itemsize) for tensor in tensors_of(tree))
