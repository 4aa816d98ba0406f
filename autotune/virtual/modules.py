"""How modules are moved and cast in a trace: a parameter stays the object that it is, as PyTorch keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autotune.virtual.known import forget_known

_set_data: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.data.__set__
_get_data: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.data.__get__


@contextmanager
def movable_modules() -> Iterator[None]:
    """Have ``Module.to`` and its kin, and ``parameter.data = …``, do to storage-less parameters what they do to others.

    On a real GPU, parameters and gradients are the same objects with new data, so that an optimizer, a tie or a name
    that was made before still holds them. PyTorch refuses that where data is on a device that is not built into it,
    and makes new parameters, or refuses to.
    """
    original = nn.Module._apply

    def apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        if not any(isinstance(parameter, FakeTensor) for parameter in module.parameters(recurse=False)):
            return original(module, fn, recurse)
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
        return module

    with (
        mock.patch.object(nn.Module, "_apply", apply),
        mock.patch.object(FakeTensor, "data", property(_get_data, _take_data), create=True),
    ):
        yield


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
        RuntimeError: it was computed from others, so that it is neither a parameter nor a gradient.
    """
    if not tensor.is_leaf:
        raise RuntimeError("Only a leaf of the graph can be given data on another device.")
    requires_grad = tensor.requires_grad
    before = torch.empty(0, dtype=tensor.dtype, device=tensor.fake_device)
    with torch.no_grad():
        given = data.detach()
    tensor.grad = None
    if requires_grad:
        # A graph that is left from before would add to the gradient of what the tensor was.
        torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(_refuse)
    torch._C._swap_tensor_impl(tensor, given)
    # What is swapped is all that C++ knows; Python's attributes stay with their object, and so do hooks, which C++ has
    # to be told again.
    forget_known(tensor)
    own = dict(tensor.__dict__)
    tensor.__dict__.update(given.__dict__)
    given.__dict__.update(own)
    tensor.requires_grad_(requires_grad)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(tensor, hooks):
            setattr(tensor, hooks, getattr(tensor, hooks))
    # That graph would also keep the memory of what the tensor was, which PyTorch gives back at once.
    _set_data(given, before)


def _refuse(gradients: Any) -> None:
    raise RuntimeError("A parameter has been moved to another device between a forward pass and its backward pass.")
