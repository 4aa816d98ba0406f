"""Applies the autograd engine's rule for accumulating gradients in place to fake tensors.

For real tensors the engine adds in place when it holds the only reference to the first gradient. For tensor
subclasses, such as fake tensors, it never does (PyTorch's ``torch/csrc/autograd/input_buffer.cpp``, ``accumulate`` and
``can_accumulate_inplace``), so the rule for real tensors is applied here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

_add = torch.ops.aten.add.Tensor


class Accumulation:
    """Recognises the additions of the autograd engine that would be in place for real tensors."""

    def __init__(self) -> None:
        with FakeTensorMode(), _Watch() as watch:
            leaf = torch.empty(2, requires_grad=True)
            (leaf * 2.0 + leaf * 3.0).sum().backward()
        self._unshared = watch.counts

    def is_in_place(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operator is the engine's addition to a gradient that has no other reference."""
        if func is not _add or kwargs or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return False
        first, second = args[0], args[1]
        return (
            isinstance(second, torch.Tensor)
            and first.shape == second.shape
            and first.dtype == second.dtype
            and _counts(first) == self._unshared
            and is_non_overlapping_and_dense_or_false(first)
        )


class _Watch(TorchDispatchMode):
    """Records the reference count of a gradient during the engine's addition when there is no other reference."""

    counts = (0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _add and torch._C._current_graph_task_id() != -1:
            self.counts = _counts(args[0])
        return func(*args, **(kwargs or {}))


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
