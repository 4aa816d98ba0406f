"""DistributedDataParallel over fake tensors: its C++ reducer, without what reads values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_type_hints
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import distributed

from autotune.virtual.ledger import Ledger
from autotune.virtual.records import Category


@contextmanager
def replicas_by_hooks(ledger: Ledger) -> Iterator[None]:
    """Patch ``DistributedDataParallel`` to reduce its buckets by a hook, and not to compare replicas.

    Buckets are built and filled by PyTorch's own reducer. It is not asked to build them anew in the order of the first
    backward pass (``torch/csrc/distributed/c10d/reducer.cpp``, ``rebuild_buckets``), which reads a tensor in C++: the
    sum of the buckets stays the same.
    """
    original = distributed.DistributedDataParallel
    made = original.__init__

    def make(module: Any, *args: Any, **kwargs: Any) -> None:
        made(module, *args, **kwargs)
        module.register_comm_hook(ledger, _reduced)
        module.reducer = _Reducer(module.reducer)

    with (
        # Both compare or copy values between ranks (DistributedDataParallel.__init__ of that module).
        mock.patch.object(distributed, "_verify_param_shape_across_processes", lambda *args, **kwargs: None),
        mock.patch.object(distributed, "_sync_module_states", lambda *args, **kwargs: None),
        mock.patch.object(original, "__init__", make),
    ):
        yield


def _reduced(ledger: Ledger, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    ledger.tag(buffer, Category.GRADIENT)
    dist.all_reduce(buffer, async_op=True)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


# PyTorch compares the annotations of a hook with these types, not with their names.
_reduced.__annotations__ = get_type_hints(_reduced)


class _Reducer:
    """The reducer of ``DistributedDataParallel``, which does not rebuild its buckets."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
