"""Serialises a dispatched operator call as JSON, and rebuilds its arguments on a real device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autotune.core.jobs.traced import tensors_in
from autotune.virtual.recording.tensors import operator_name, type_of_device

_TORCH_CONSTANTS: tuple[type, ...] = (torch.dtype, torch.layout, torch.memory_format)


_DISTINCT_VALUES = 1 << 12
"""Number of random values in a tensor, repeated to fill it: generating more takes longer than most operators."""


class _UnserialisableError(Exception):
    """An argument cannot be serialised."""


def call_of(func: Any, args: Any, kwargs: Any, device_type: str) -> str:
    """Return the call as JSON; empty if an argument cannot be serialised, such as a generator or a process group.

    Example: ``["aten.mul.Tensor", [{"tensor": [[4, 8], [8, 1], "float32", true]}, 2.0], {}]``. A tensor has shape,
    strides, dtype, and whether it is on the device.

    Args:
        device_type: type of the target device.
    """
    try:
        named = {name: _serialised(value, device_type) for name, value in kwargs.items()}
        return json.dumps([operator_name(func), _serialised(tuple(args), device_type), named])
    except _UnserialisableError:
        return ""


def _serialised(value: Any, device_type: str) -> Any:
    if isinstance(value, FakeTensor):
        metadata = [list(value.shape), list(value.stride()), _name(value.dtype), type_of_device(value) == device_type]
        return {"tensor": metadata}
    if isinstance(value, (tuple, list)):
        return [_serialised(item, device_type) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.device):
        return {"device": value.type == device_type}
    if isinstance(value, _TORCH_CONSTANTS):
        return {"torch": _name(value)}
    raise _UnserialisableError


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def arguments_of(call: str, device: torch.device) -> tuple[Any, list[Any], dict[str, Any]]:
    """Return the operator of a call and its arguments on a device; tensor values are the same in every process.

    Raises:
        AttributeError: this PyTorch has no such operator.
    """
    name, args, kwargs = json.loads(call)
    namespace, packet, overload = name.split(".")
    if namespace not in ("aten", "prims") and find_spec(namespace) is not None:
        # Importing the library registers its operators.
        import_module(namespace)
    func = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    bound = _index_bound((args, list(kwargs.values())))
    positional = [_deserialised(value, device, bound) for value in args]
    if packet.rstrip("_") == "masked_scatter":
        positional[1] = _mask_for(positional[1], positional[2], rows=False)
    elif packet == "_grouped_mm" and isinstance(positional[2], torch.Tensor):
        positional[2] = _even_offsets(positional[0], positional[1], len(positional[2])).to(positional[2])
    elif packet.rstrip("_") == "index_put" and len(positional[1]) == 1:
        positional[1] = [_mask_for(positional[1][0], positional[2], rows=True)]
    return func, positional, {key: _deserialised(value, device, bound) for key, value in kwargs.items()}


def _even_offsets(first: torch.Tensor, second: torch.Tensor, groups: int) -> torch.Tensor:
    """Return end offsets of equal groups, in the dimension that a grouped matrix product slices.

    A kernel skips a group that ends before it begins (aten/src/ATen/native/GroupedMMUtils.h), or fails on a GPU.
    """
    size = first.size(-1) if first.dim() == second.dim() else first.size(0) if first.dim() == 2 else second.size(-1)
    return torch.arange(1, groups + 1) * size // groups


def _mask_for(mask: Any, values: torch.Tensor, *, rows: bool) -> Any:
    """Return a mask of the same shape that selects one element per value, or per row of values.

    If a mask selects more, the kernel triggers a device assertion, after which the process can run no operator.
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool or not values.dim():
        return mask
    count = len(values) if rows else values.numel()
    return (torch.arange(mask.numel(), device=mask.device) < count).view(mask.shape)


def _index_bound(tree: Any) -> int:
    """Return an exclusive bound on indices that are valid in every dimension of the first tensor, the indexed one."""
    sizes = next((shape for shape, *_ in tensors_in(tree) if shape), ())
    return max(1, min(sizes, default=2))


def _deserialised(value: Any, device: torch.device, bound: int) -> Any:
    if isinstance(value, list):
        return [_deserialised(item, device, bound) for item in value]
    if not isinstance(value, dict):
        return value
    if "torch" in value:
        return getattr(torch, value["torch"])
    host = torch.device("cpu")
    if "device" in value:
        return device if value["device"] else host
    shape, stride, dtype, on_device = value["tensor"]
    return _tensor(shape, stride, getattr(torch, dtype), device if on_device else host, bound)


def _tensor(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, bound: int
) -> torch.Tensor:
    spanned = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    values = _values(dtype, bound if not dtype.is_floating_point else 0).to(device)
    if spanned <= _DISTINCT_VALUES:
        return values[:spanned].clone().as_strided(list(shape), list(stride))
    repeated = values.expand(-(-spanned // _DISTINCT_VALUES), _DISTINCT_VALUES).flatten()
    return repeated[:spanned].as_strided(list(shape), list(stride))


@cache
def _values(dtype: torch.dtype, bound: int) -> torch.Tensor:
    """Return values of a dtype: positive, for logarithms, and not denormal, which would be slow on a CPU."""
    source = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return (torch.rand(_DISTINCT_VALUES, generator=source) * 0.9 + 0.1).to(dtype)
    return torch.randint(0, bound, (_DISTINCT_VALUES,), generator=source).to(dtype)
