"""Applies PyTorch's gradient accumulation rules to a trace: which sums run in place, which result becomes ``.grad``.

For real tensors the autograd engine adds in place when it holds the only reference to the first gradient
(``torch/csrc/autograd/input_buffer.cpp``, ``accumulate`` and ``can_accumulate_inplace``), and the formulas of indexing
fill the zeros that they have just made (``gather_backward`` and ``index_select_backward_symint`` in
``aten/src/ATen/native/TensorAdvancedIndexing.cpp``, ``value_selecting_reduction_backward`` in
``ReduceOpsUtils.h``, ``index_backward`` in ``torch/csrc/autograd/FunctionsManual.cpp``). For tensor subclasses, such as
fake tensors, each makes a copy, so the rule for real tensors is applied here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_add, _add_ = _aten.add.Tensor, _aten.add_.Tensor
_INDEXING: dict[Any, tuple[Any, Callable[[Any, Any], Any]]] = {
    _aten.scatter_add.default: (_aten.scatter_add_.default, lambda given, index: given.gather(0, index)),
    _aten.scatter.src: (_aten.scatter_.src, lambda given, index: given.max(0)[0]),
    _aten.index_add.default: (_aten.index_add_.default, lambda given, index: given.index_select(0, index)),
    _aten.index_put.default: (_aten.index_put_.default, lambda given, index: given[index]),
}
"""Operators in the derivative formulas of indexing: for tensor subclasses, PyTorch calls the key instead of the first
value, which it calls for real tensors. The second value is a function whose backward pass contains the operator."""
_STORES_GRADIENT = frozenset({_aten.detach.default, _aten.clone.default, _aten.new_empty_strided.default})
"""Operators with which ``AccumulateGrad`` stores a tensor, or a copy of it, as the gradient of a parameter."""


def in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the in-place operator that autograd would run on real tensors, or None if it would run ``func``.

    Args:
        func: an operator.
        args: its positional arguments.
        kwargs: its named arguments.
    """
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return None
    if func is _add:
        return _add_ if not kwargs and _is_added(args[0], args[1]) else None
    return _INDEXING[func][0] if func in _INDEXING and _counts(args[0]) == counts_alone()[func] else None


def _is_added(first: torch.Tensor, second: Any) -> bool:
    return (
        isinstance(second, torch.Tensor)
        and first.shape == second.shape
        and first.dtype == second.dtype
        and _counts(first) == counts_alone()[_add]
        and is_non_overlapping_and_dense_or_false(first)
    )


def becomes_gradient(func: Any) -> bool:
    """Return whether the result of an operator becomes the first gradient of a parameter.

    Source: ``torch/csrc/autograd/functions/accumulate_grad.h``, ``accumulateGrad``.
    """
    if func not in _STORES_GRADIENT:
        return False
    parameter = getattr(torch._C._current_autograd_node(), "variable", None)
    return getattr(parameter, "_is_param", False)


@cache
def counts_alone() -> Mapping[Any, tuple[int, int]]:
    """Return, per operator, the reference counts of tensor and storage of a gradient that only autograd refers to.

    The first call runs a backward pass on the CPU.
    """
    with FakeTensorMode():
        leaf = torch.empty(2, requires_grad=True)
        index = torch.empty(2, dtype=torch.int64)
        found = {func: _counts_at(func, index_by(leaf, index)) for func, (_, index_by) in _INDEXING.items()}
        return {**found, _add: _counts_at(_add, leaf * 2.0 + leaf * 3.0)}


class _Watch(TorchDispatchMode):
    """Records the reference counts of an operator's first argument while only autograd refers to it."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.counts = (0, 0)
        self._operator = operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._operator and torch._C._current_graph_task_id() != -1:
            self.counts = _counts(args[0])
        return func(*args, **(kwargs or {}))


def _counts_at(operator: Any, made: torch.Tensor) -> tuple[int, int]:
    with _Watch(operator) as watch:
        made.sum().backward()
    counts: tuple[int, int] = watch.counts
    return counts


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    return int(tensor._use_count()), int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
