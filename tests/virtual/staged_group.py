"""A process group that communicates by gloo over its own memory, so that only this thread frees tensors.

gloo's threads keep a tensor until they have sent it. When they drop the last reference, PyTorch's profiler, which
records the memory of the thread that it was started in, does not see the free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

NAME = "staged"


def register() -> None:
    """Register the backend with PyTorch."""
    dist.Backend.register_backend(NAME, _made, devices=["cpu"])


def _made(store: Any, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:
    return StagedGroup(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout))


class StagedGroup(dist.ProcessGroup):
    """The collectives that accelerate, FSDP2, DDP and DeepSpeed use on the CPU."""

    def __init__(self, rank: int, size: int, gloo: Any) -> None:
        super().__init__(rank, size)
        self._gloo = gloo

    @property
    def group_name(self) -> str:
        """The name by which PyTorch knows the group; its own attribute is set for built-in backends alone."""
        return str(dist.distributed_c10d._world.pg_names[self])

    def getBackendName(self) -> str:  # noqa: N802 (PyTorch's name)
        """Return the name by which libraries know the backend."""
        return NAME

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Reduce each tensor over all ranks, in place."""
        return self._run(lambda staged: self._gloo.allreduce(staged, opts or AllreduceOptions()), tensors, tensors)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Give each tensor the values of one rank."""
        return self._run(lambda staged: self._gloo.broadcast(staged, opts or BroadcastOptions()), tensors, tensors)

    def allgather(self, outputs: Any, inputs: Sequence[torch.Tensor], opts: Any = None) -> Any:
        """Give every rank the tensors of all; gloo's own operator for that joins them in a tensor beside."""
        received = [_staged(inputs[0]) for _ in range(self.size())]
        for rank, tensor in enumerate(received):
            options = BroadcastOptions()
            options.rootRank = rank
            self._gloo.broadcast([tensor], options).wait()
        return _taken(outputs[0], received)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        """Give every rank the tensors of all, one behind the other."""
        return self.allgather([list(torch.chunk(output, self.size()))], [given], opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        """Reduce a tensor and give each rank a piece of it."""
        reduced = _staged(given)
        options = AllreduceOptions()
        options.reduceOp = (opts or ReduceScatterOptions()).reduceOp
        self._gloo.allreduce([reduced], options).wait()
        return _taken([output], [torch.chunk(reduced, self.size())[self.rank()].view(output.shape)])

    def reduce_scatter(self, outputs: Any, given: Any, opts: Any = None) -> Any:
        """Reduce a list of tensors and give each rank one of them."""
        options = AllreduceOptions()
        options.reduceOp = (opts or ReduceScatterOptions()).reduceOp
        reduced = [_staged(tensor) for tensor in given[0]]
        for tensor in reduced:
            self._gloo.allreduce([tensor], options).wait()
        return _taken(outputs, [reduced[self.rank()]])

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        return self._gloo.barrier(opts or BarrierOptions())

    def _run(self, collective: Callable[[list[torch.Tensor]], Any], given: Sequence[torch.Tensor], taken: Any) -> Any:
        staged = [_staged(tensor) for tensor in given]
        collective(staged).wait()
        return _taken(taken, staged)


def _staged(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in memory that numpy allocates."""
    bits = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}[tensor.itemsize]
    copy = torch.from_numpy(np.empty(tensor.numel(), dtype=bits)).view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor.detach())


def _taken(tensors: Sequence[torch.Tensor], staged: Sequence[torch.Tensor]) -> Any:
    for tensor, values in zip(tensors, staged, strict=True):
        tensor.detach().copy_(values)
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(list(tensors))
    # PyTorch's own declarations of this module leave it out.
    made: Any = torch._C._distributed_c10d
    return made._create_work_from_future(future)
