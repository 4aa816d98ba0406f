"""Patches for PyTorch's modules and for libraries, which behave differently when they detect fake tensors."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autotune.virtual.operators.known import forget_known
from autotune.virtual.recording.ledger import Ledger
from autotune.virtual.recording.records import Category

Patches = Iterator[AbstractContextManager[object]]
"""Context managers that a trace enters in order; each is entered before the next one is created."""
_RNG_STATE_BYTES = torch.get_rng_state().numel()
_set_data: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.data.__set__
_get_data: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.data.__get__
_deepcopy: Callable[[torch.Tensor, dict[int, Any]], torch.Tensor] = torch.Tensor.__deepcopy__


def fake_tensors_accepted(assume: Callable[[str], None]) -> Patches:
    """Patch transformers to treat fake tensors as ordinary ones, and checkpointing to store the generator's state.

    For fake tensors, transformers builds the attention masks of an exported graph, not those of a training step.

    Args:
        assume: called with each warning of transformers, from 5.17 on, that a kernel package of a layer is missing.
    """
    yield warnings.catch_warnings()
    # torch.Tensor.__deepcopy__ reads the address of every tensor, to detect tensors without storage.
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    module = sys.modules.get("transformers.utils.import_utils")
    if module is not None:
        yield mock.patch.object(module, "is_fake_tensor", lambda tensor: False)
        logger = import_module("transformers.integrations.hub_kernels").logger

        def warned(text: str) -> None:
            if "falling back" in text:
                assume(f"{text.partition('. ')[0]} here: slower, larger code is traced")

        yield mock.patch.object(logger, "warning_once", warned)
    functional = sys.modules.get("bitsandbytes.functional")
    if functional is not None:
        # CUDA managed memory, whose pages migrate between host and device on access; PyTorch does not count it.
        yield mock.patch.multiple(
            functional,
            get_paged=_get_paged,
            prefetch_tensor=lambda *args, **kwargs: None,
            fill=lambda tensor, value, **more: tensor.fill_(value),
        )
    modules = sys.modules.get("bitsandbytes.nn.modules")
    if modules is not None:
        yield mock.patch.object(modules, "fix_4bit_weight_quant_state_from_module", _restore_quant_state)
    state = partial(torch.empty, _RNG_STATE_BYTES, dtype=torch.uint8, device="cpu")
    yield mock.patch.multiple(torch, get_rng_state=state, set_rng_state=lambda state: None)


def _restore_quant_state(module: nn.Module) -> None:
    """Restore the quantisation state that a 4-bit weight loses when FSDP2 gathers it, without a change of its class."""
    if getattr(module.weight, "quant_state", None) is None:
        module.weight.quant_state = module.quant_state


def _get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> torch.Tensor:
    paged = torch.empty(shape, dtype=dtype, device="cpu")
    paged.is_paged = True
    return paged


def movable_modules(ledger: Ledger) -> Patches:
    """Patch ``Module.to``, its relatives, ``parameter.data = …`` and copies to treat fake parameters like real ones.

    On a real GPU, parameters and gradients keep their identity and get new data, so references from optimizers and tied
    modules stay valid. For a device that is not built in, PyTorch creates new parameters instead, or raises an error.

    A copy of a fake tensor keeps the fake tensor mode of the original. ``deepcopy`` would copy the mode, including its
    weak references to storages, which are then released once too often and corrupt the memory of the process.

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
    yield mock.patch.object(FakeTensor, "__deepcopy__", _copied)
    sharded = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    if sharded is not None:
        # It bypasses the registration hooks, and the optimizer has no frozen weights.
        replace = sharded.FSDPParam._setattr_on_modules

        def replaced(parameter: Any, tensor: torch.Tensor) -> None:
            ledger.tag(tensor, Category.PARAMETER)
            replace(parameter, tensor)

        yield mock.patch.object(sharded.FSDPParam, "_setattr_on_modules", replaced)


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Copy a fake parameter like a real one: its values alone, without attributes of an engine or a gradient.

    PyTorch calls ``nn.Parameter.__deepcopy__`` only for parameters of its own class.
    """
    if type(tensor) is not FakeTensor or not getattr(tensor, "_is_param", False):
        return _deepcopy(tensor, memo)
    if id(tensor) not in memo:
        values = tensor.data.clone(memory_format=torch.preserve_format)
        memo[id(tensor)] = nn.Parameter(values, tensor.requires_grad)
    result: torch.Tensor = memo[id(tensor)]
    return result


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
