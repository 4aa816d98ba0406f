"""How modules are moved and cast in a trace: parameters without storage cannot be swapped, as PyTorch would."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_Moved = dict[int, tuple[Callable[[], nn.Parameter | None], Callable[[], nn.Parameter | None]]]


@contextmanager
def movable_modules() -> Iterator[None]:
    """Have ``Module.to`` and its kin work on parameters without storage.

    On one device, a cast parameter is the same object with new data, as for real tensors. On another device it is a new
    object, because PyTorch refuses to change the device of a storage-less tensor; ties between modules are kept.
    """
    original = nn.Module._apply
    moved: _Moved = {}

    def apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        if not any(isinstance(parameter, FakeTensor) for parameter in module.parameters(recurse=False)):
            return original(module, fn, recurse)
        for child in module.children() if recurse else ():
            child._apply(fn)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _applied(parameter, fn, moved)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module

    nn.Module._apply = apply
    try:
        yield
    finally:
        nn.Module._apply = original


def _applied(parameter: nn.Parameter, fn: Any, moved: _Moved) -> nn.Parameter:
    old, moved_to = (reference() for reference in moved.get(id(parameter), (_nothing, _nothing)))
    if old is parameter and moved_to is not None:
        return moved_to
    with torch.no_grad():
        data = fn(parameter)
    if data is parameter:
        return parameter
    if data.device == parameter.device:
        parameter.data = data
        return parameter
    new = nn.Parameter(data, requires_grad=parameter.requires_grad)
    # Neither is kept alive: what a trace counts is what is alive.
    moved[id(parameter)] = (weakref.ref(parameter), weakref.ref(new))
    return new


def _nothing() -> None:
    return None
