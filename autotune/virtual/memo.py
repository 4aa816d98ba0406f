"""What operators return, kept by the descriptions of what they are given: PyTorch's own rules are asked once for each.

The fake tensor mode keeps them too, by keys that take it most of its time to make. Here only what is plain is kept:
operators that change their first argument, or that return new tensors of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from autotune.virtual.tensors import tensors_of

_aten = torch.ops.aten
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
# What gives its first argument another size or storage.
_RESHAPES = frozenset({_aten.resize_, _aten.resize_as_, _aten.set_})


@dataclass(frozen=True)
class _Fresh:
    """A new tensor, whose storage it fills."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self, fake: FakeTensorMode) -> FakeTensor:
        with in_kernel_invocation_manager(fake):
            empty = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return FakeTensor(fake, empty, self.device)


_FIRST = object()
"""The first argument itself."""
_kept: dict[Any, Any] = {}


class _NotPlainError(Exception):
    pass


def run(func: Any, args: Any, kwargs: Any, fake: FakeTensorMode) -> Any:
    """Run an operator on tensors without storage, under the fake tensor mode that is on the stack."""
    try:
        key = (func, torch.get_default_dtype(), _described(args), tuple((n, _described(v)) for n, v in kwargs.items()))
    except _NotPlainError:
        return func(*args, **kwargs)
    kept = _kept.get(key)
    if kept is _FIRST:
        return args[0]
    if kept is not None:
        return kept.make(fake) if isinstance(kept, _Fresh) else type(kept)(one.make(fake) for one in kept)
    result = func(*args, **kwargs)
    rule = _rule(func, args, kwargs, result)
    if rule is not None:
        _kept[key] = rule
    return result


def _described(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        if value.constant is not None:
            raise _NotPlainError
        return value.shape, value.stride(), value.dtype, value.fake_device
    if isinstance(value, (tuple, list)):
        return tuple([_described(item) for item in value])
    if isinstance(value, _PLAIN):
        # 1, 1.0 and True are equal, and make results of different types.
        return type(value), value
    raise _NotPlainError


def _rule(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Return how to make a result again, or None where there is more to it."""
    if func.is_view or torch.Tag.inplace_view in func.tags or func.overloadpacket in _RESHAPES:
        return None
    if args and result is args[0]:
        return _FIRST
    if func._schema.is_mutable:
        return None
    taken = {tensor.untyped_storage()._cdata for tensor in tensors_of((args, tuple(kwargs.values())))}
    if isinstance(result, FakeTensor):
        return _fresh(result, taken)
    if isinstance(result, (tuple, list)) and result and all(isinstance(one, FakeTensor) for one in result):
        found = [_fresh(one, taken) for one in result]
        return type(result)(found) if type(result) in (tuple, list) and None not in found else None
    return None


def _fresh(tensor: FakeTensor, taken: set[int]) -> _Fresh | None:
    """Return how to make a tensor, which later ones must not share; None where it is not all of a storage."""
    storage = tensor.untyped_storage()
    if storage._cdata in taken or tensor.constant is not None or tensor.dtype.is_complex:
        return None
    taken.add(storage._cdata)
    fresh = _Fresh(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.fake_device)
    same = fresh.make(tensor.fake_mode)
    return fresh if not tensor.storage_offset() and same.untyped_storage().nbytes() == storage.nbytes() else None
