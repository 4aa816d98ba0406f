"""Patches moves, casts and copies of modules in a trace: fake parameters behave like parameters on a real GPU."""

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

    On a real GPU, parameters and gradients keep their identity and get new data, so references from optimizers and tied
    modules stay valid. For a device that is not built in, PyTorch creates new parameters instead, or raises an error.

    A copy of a fake parameter keeps the fake tensor mode of the original. ``deepcopy`` would copy the mode, including
    its weak references to storages, which are then released once too often and corrupt the memory of the process.

    Args:
        ledger: replaced tensors trigger no registration hook, so their storages are tagged here.
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
    yield mock.patch.object(FakeTensor, "data", property(_get_data, _set_data_on_any_device))
    yield mock.patch.object(FakeTensorMode, "__deepcopy__", lambda mode, _: mode, create=True)


def _apply_in_place(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool) -> None:
    for child in module.children() if recurse else ():
        child._apply(fn)
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        gradient = parameter.grad
        _apply_to(parameter, fn)
        if gradient is not None:
            _apply_to(gradient, fn)
            parameter.grad = gradient
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)


def _apply_to(tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.no_grad():
        data = fn(tensor)
    if data is not tensor:
        tensor.data = data


def _set_data_on_any_device(tensor: FakeTensor, data: torch.Tensor) -> None:
    if isinstance(data, FakeTensor) and data.fake_device != tensor.fake_device:
        _swap(tensor, data)
    else:
        _set_data(tensor, data)


def _swap(tensor: FakeTensor, data: FakeTensor) -> None:
    """Replace the data of a tensor by data on another device.

    Raises:
        RuntimeError: the tensor was computed from others, so it is neither a parameter nor a gradient.
    """
    if not tensor.is_leaf:
        raise RuntimeError("Only a leaf of the graph can be given data on another device.")
    requires_grad = tensor.requires_grad
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.fake_device)
    with torch.no_grad():
        replacement = data.detach()
    tensor.grad = None
    if requires_grad:
        # A graph recorded before the exchange would accumulate into the gradient of the old tensor.
        torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(_raise_stale_graph)
    torch._C._swap_tensor_impl(tensor, replacement)
    # The swap exchanges the C++ tensors only: exchange the Python attributes, and register the hooks with C++ again.
    forget_known(tensor)
    attributes = dict(tensor.__dict__)
    tensor.__dict__.update(replacement.__dict__)
    replacement.__dict__.update(attributes)
    tensor.requires_grad_(requires_grad)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, hooks):
            setattr(tensor, hooks, getattr(tensor, hooks))
    # An old graph must not keep the memory of the old tensor alive: PyTorch frees it at once.
    _set_data(replacement, empty)


def _raise_stale_graph(gradients: Any) -> None:
    raise RuntimeError("A parameter has been moved to another device between a forward pass and its backward pass.")
