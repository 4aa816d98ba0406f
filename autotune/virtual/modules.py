"""Moves, casts and copies modules in a trace as PyTorch does on a real GPU: parameters keep their identity or mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autotune.virtual.known import forget_known
from autotune.virtual.ledger import Ledger
from autotune.virtual.libraries import Patches
from autotune.virtual.records import Category

_set_data: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.data.__set__
_get_data: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.data.__get__


def movable_modules(ledger: Ledger) -> Patches:
    """Patch ``Module.to``, its relatives, ``parameter.data = …`` and copies to treat fake parameters like real ones.

    On a real GPU, parameters and gradients stay the same objects and get new data, so that an optimizer, a tied module
    or a name that refers to them stays valid. For a device that is not built into PyTorch it creates new parameters
    instead, or raises an error. Copies of parameters belong to the mode of those that they are copies of. PyTorch
    copies the mode, and with it weak references to storages, which are then released once more than they were taken:
    memory of the process is overwritten.

    Args:
        ledger: what is replaced passes no registration hook, so it is tagged here.
    """
    original = nn.Module._apply

    def apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        if any(isinstance(parameter, FakeTensor) for parameter in module.parameters(recurse=False)):
            _apply_in_place(module, fn, recurse)
        else:
            original(module, fn, recurse)
        for category, tensors in ((Category.PARAMETER, module._parameters), (Category.BUFFER, module._buffers)):
            for tensor in filter(torch.is_tensor, tensors.values()):
                ledger.tag(tensor, category)
        return module

    yield mock.patch.object(nn.Module, "_apply", apply)
    yield mock.patch.object(FakeTensor, "data", property(_get_data, _take_data))
    yield mock.patch.object(FakeTensorMode, "__deepcopy__", lambda mode, _: mode, create=True)


def _apply_in_place(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> None:
    for child in module.children() if recurse else ():
        child._apply(fn)
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        gradient = parameter.grad
        _applied(parameter, fn)
        if gradient is not None:
            _applied(gradient, fn)
            parameter.grad = gradient
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)


def _applied(tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.no_grad():
        data = fn(tensor)
    if data is not tensor:
        tensor.data = data


def _take_data(tensor: FakeTensor, data: torch.Tensor) -> None:
    if isinstance(data, FakeTensor) and data.fake_device != tensor.fake_device:
        _exchange(tensor, data)
    else:
        _set_data(tensor, data)


def _exchange(tensor: FakeTensor, data: FakeTensor) -> None:
    """Give a tensor data on another device.

    Raises:
        RuntimeError: the tensor was computed from others, so it is neither a parameter nor a gradient.
    """
    if not tensor.is_leaf:
        raise RuntimeError("Only a leaf of the graph can be given data on another device.")
    requires_grad = tensor.requires_grad
    before = torch.empty(0, dtype=tensor.dtype, device=tensor.fake_device)
    with torch.no_grad():
        given = data.detach()
    tensor.grad = None
    if requires_grad:
        # A graph built before the exchange would accumulate into the gradient of the old tensor.
        torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(_refuse)
    torch._C._swap_tensor_impl(tensor, given)
    # The swap exchanges the C++ tensors; Python attributes stay with their object, and so do hooks, which have to be
    # registered with C++ again.
    forget_known(tensor)
    own = dict(tensor.__dict__)
    tensor.__dict__.update(given.__dict__)
    given.__dict__.update(own)
    tensor.requires_grad_(requires_grad)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, hooks):
            setattr(tensor, hooks, getattr(tensor, hooks))
    # That graph would also keep the memory of the old tensor alive, which PyTorch frees at once.
    _set_data(given, before)


def _refuse(gradients: Any) -> None:
    raise RuntimeError("A parameter has been moved to another device between a forward pass and its backward pass.")
