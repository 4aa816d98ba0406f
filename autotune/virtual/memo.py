"""Caches the metadata of operators' results by the metadata of their arguments, so that fake kernels run once for each.

The fake tensor mode has a cache too, but building its keys takes most of its time. This cache covers only the simple
cases: operators that change their first argument, and operators that return new tensors or views of an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from autotune.virtual.tensors import tensors_of

_aten = torch.ops.aten
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
# Operators that give their first argument another size or storage, or that wrap an existing tensor.
_SPECIAL = frozenset({_aten.resize_, _aten.resize_as_, _aten.set_, _aten.lift, _aten.lift_fresh, _aten.lift_fresh_copy})


@dataclass(frozen=True)
class _Made:
    """Metadata of a result: a tensor that spans its own new storage, or a view of an argument.

    Attributes:
        view_of: the position of the viewed argument, or None.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    view_of: int | None

    def make(self, args: Any, fake: FakeTensorMode) -> FakeTensor:
        with in_kernel_invocation_manager(fake):
            if self.view_of is None:
                made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            else:
                made = torch.empty(0, dtype=self.dtype, device="meta")
                made.set_(args[self.view_of].untyped_storage(), self.offset, self.shape, self.stride)
        return FakeTensor(fake, made, self.device)


_FIRST = object()
"""The first argument itself."""
_kept: dict[Any, Any] = {}


class _NotPlainError(Exception):
    pass


def run(func: Any, args: Any, kwargs: Any, fake: FakeTensorMode) -> Any:
    """Run an operator on fake tensors, under the fake tensor mode that is on the stack."""
    try:
        key = (func, torch.get_default_dtype(), _described(args), tuple((n, _described(v)) for n, v in kwargs.items()))
    except _NotPlainError:
        return func(*args, **kwargs)
    kept = _kept.get(key)
    if kept is _FIRST:
        return args[0]
    if kept is not None:
        return kept.make(args, fake) if isinstance(kept, _Made) else type(kept)(one.make(args, fake) for one in kept)
    result = func(*args, **kwargs)
    rule = _rule(func, args, kwargs, result)
    if rule is not None:
        _kept[key] = rule
    return result


def _described(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        if value.constant is not None:
            raise _NotPlainError
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
    if isinstance(value, (tuple, list)):
        return tuple([_described(item) for item in value])
    if isinstance(value, _PLAIN):
        # 1, 1.0 and True are equal, but give results of different types.
        return type(value), value
    raise _NotPlainError


def _rule(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Return how to recreate a result, or None where it is not one of the simple cases."""
    if torch.Tag.inplace_view in func.tags or func.overloadpacket in _SPECIAL:
        return None
    if args and result is args[0]:
        return _FIRST
    if func._schema.is_mutable:
        return None
    results = [result] if isinstance(result, torch.Tensor) else result
    if type(results) not in (tuple, list) or not all(isinstance(one, FakeTensor) for one in results):
        return None
    rules = [_viewed(one, args) for one in results] if func.is_view else _fresh(results, (args, kwargs))
    if not rules or None in rules:
        return None
    return rules[0] if isinstance(result, torch.Tensor) else type(result)(rules)


def _viewed(tensor: FakeTensor, args: Any) -> _Made | None:
    """Return how to recreate a view of an argument."""
    storage = tensor.untyped_storage()._cdata
    for position, given in enumerate(args):
        if isinstance(given, FakeTensor) and given.untyped_storage()._cdata == storage:
            return _made(tensor, position)
    return None


def _fresh(tensors: Sequence[FakeTensor], given: tuple[Any, Any]) -> list[_Made | None]:
    """Return how to recreate tensors, each of which has to span a storage that no other tensor shares."""
    args, kwargs = given
    taken = {tensor.untyped_storage()._cdata for tensor in tensors_of((args, tuple(kwargs.values())))}
    found: list[_Made | None] = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        made = _made(tensor, None) if storage._cdata not in taken and not tensor.storage_offset() else None
        if made is not None and made.make((), tensor.fake_mode).untyped_storage().nbytes() != storage.nbytes():
            made = None
        found.append(made)
        taken.add(storage._cdata)
    return found


def _made(tensor: FakeTensor, view_of: int | None) -> _Made | None:
    if tensor.constant is not None or tensor.dtype.is_complex:
        return None
    shape, stride = tuple(tensor.shape), tensor.stride()
    return _Made(shape, stride, int(tensor.storage_offset()), tensor.dtype, tensor.fake_device, view_of)
