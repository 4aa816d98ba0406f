"""Autocast on the virtual GPU, with CUDA's operator lists (ATen/autocast_mode.h, a header shipped in every wheel)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from autotune.virtual.patches.libraries import Patches
from autotune.virtual.patches.unsupported import UnsupportedError
from autotune.virtual.recording.tensors import VIRTUAL, argument, tensors_of, type_of_device

_KEY = "AutocastPrivateUse1"
# Macros that list CUDA's operators by cast policy: run in the lower-precision dtype; in float32; with `dtype=float32`
# unless the caller passed a dtype; in the widest dtype of the arguments.
_HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
_LOWER, _FLOAT32 = "AT_FORALL_LOWER_PRECISION_FP", "AT_FORALL_FP32"
_FLOAT32_RESULT, _WIDEST = "AT_FORALL_FP32_SET_OPT_DTYPE", "AT_FORALL_PROMOTE"

_casts: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the device's floating-point tensors in ``value`` to ``dtype``; parameters are cast once per region.

    The last tensor is cast first: in C++, the casts are arguments of one call (``cached_cast(…, args, …)...`` in
    aten/src/ATen/autocast_mode.h), and GCC, which builds PyTorch's wheels, evaluates arguments from right to left.
    """

    def cast_one(tensor: torch.Tensor) -> torch.Tensor:
        eligible = tensor.is_floating_point() and type_of_device(tensor) == VIRTUAL and tensor.dtype != torch.float64
        if not eligible or tensor.dtype == dtype:
            return tensor
        is_cached = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        if not (is_cached and dtype != torch.float32 and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        key = (id(tensor), dtype)
        if key not in _casts:
            _casts[key] = (tensor, tensor.to(dtype))
        return _casts[key][1]

    leaves, structure = tree_flatten(value)
    last_first = [cast_one(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in reversed(leaves)]
    return tree_unflatten(last_first[::-1], structure)


@contextmanager
def autocast_cache_cleared() -> Iterator[None]:
    """Clear the cache of cast parameters at the end of the outermost autocast region."""
    original = torch.clear_autocast_cache

    def clear() -> None:
        _casts.clear()
        original()

    with mock.patch.object(torch, "clear_autocast_cache", clear):
        yield
    _casts.clear()


def cuda_scaled_and_cast() -> Patches:
    """Patch ``torch.autocast("cuda")`` and ``torch.amp.GradScaler("cuda")`` to apply to the device.

    Without CUDA, PyTorch disables both at construction, so an object constructed before the trace cannot be used.
    """
    enter = torch.autocast.__enter__

    def entered(region: torch.autocast) -> Any:
        if region.device == "cuda":
            raise UnsupportedError("torch.autocast('cuda') was made outside of the traced function. Make it inside.")
        return enter(region)

    yield mock.patch.object(torch.autocast, "__init__", _on_virtual_device(torch.autocast.__init__, "device_type"))
    yield mock.patch.object(torch.autocast, "__enter__", entered)
    yield mock.patch.object(torch.amp.GradScaler, "__init__", _on_virtual_device(torch.amp.GradScaler.__init__))


def _on_virtual_device(build: Callable[..., None], name: str = "device") -> Callable[..., None]:
    """Wrap a constructor: the device ``cuda``, by position, by name or by default, becomes the virtual device."""

    @wraps(build)
    def built(made: Any, *args: Any, **words: Any) -> None:
        given, *others = args or (words.pop(name, "cuda"),)
        build(made, VIRTUAL if given == "cuda" else given, *others, **words)

    return built


@cache
def register_autocast() -> tuple[torch.library.Library, ...]:
    """Register autocast for the device, once; the caller keeps the returned libraries alive."""
    everything = torch.library.Library("_", "IMPL", _KEY)
    everything.fallback(torch.library.fallthrough_kernel)
    library = torch.library.Library("aten", "IMPL", _KEY)
    for macro, choose in (
        (_LOWER, lambda arguments: torch.get_autocast_dtype(VIRTUAL)),
        (_FLOAT32, lambda arguments: torch.float32),
        (_WIDEST, _widest),
    ):
        for name in listed_operators(macro):
            library.impl(name, _casting(_operator(name), choose))
    for name in listed_operators(_FLOAT32_RESULT):
        library.impl(name, _with_float32_result(_operator(name)))
    return everything, library


def listed_operators(macro: str) -> list[str]:
    """Parse the operator names of a macro, such as ``softmax.int``, from the installed PyTorch's header."""
    _, _, listed = _HEADER.read_text(encoding="utf-8").partition(f"#define {macro}(_)")
    found = re.findall(r"\b_\((\w+)(?:, (\w+))?\)", listed.partition("\n\n")[0])
    if not found:
        raise NotImplementedError(f"{_HEADER} of PyTorch {torch.__version__} has no list {macro}.")
    return [f"{name}.{overload}" if overload else name for name, overload in found]


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY)))


def _casting(operator: Any, choose: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            args, kwargs = cast((args, kwargs), choose((args, kwargs)))
            return operator(*args, **kwargs)

    return run


def _with_float32_result(operator: Any) -> Callable[..., Any]:
    place = [parameter.name for parameter in operator._schema.arguments].index("dtype")

    def run(*args: Any, **kwargs: Any) -> Any:
        first, given = args[0], argument(operator, args, kwargs, "dtype")
        if given is None and first.dtype in (torch.bfloat16, torch.float16) and type_of_device(first) == VIRTUAL:
            args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
        with _without_autocast():
            return operator(*args, **kwargs)

    return run


def _widest(arguments: Any) -> torch.dtype:
    dtypes = [tensor.dtype for tensor in tensors_of((arguments[0], tuple(arguments[1].values())))]
    return torch.float32 if torch.float32 in dtypes else dtypes[0]
