"""Computes small and integer operators on the host: branches, shapes and counts of programs depend on them.

Device memory of a null GPU is host memory, so an operator's own CPU kernel can write the result. The CUDA kernel's host
code runs first, so that everything is allocated as on a GPU. What depends on large tensors of floating-point numbers
stays whatever was in memory; what is drawn from such, or is their largest, is the last index, which is a valid token.

PyTorch calls :func:`hook` at the end of ``import torch``: the folder beside this file names it as an entry point of the
group ``torch.backends``. Operators are replaced when the process first uses CUDA. ``NULLGPU_INTEGERS=0`` leaves all as
it is.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

# Operators, in-place forms included, whose results programs look at.
# fmt: off
_OPERATORS = [
    "eq", "ne", "lt", "le", "gt", "ge", "isin", "equal", "logical_and", "logical_or",
    "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor",
    "add", "sub", "rsub", "mul", "div", "remainder", "floor_divide", "fmod", "neg", "abs", "sign", "reciprocal",
    "sqrt", "rsqrt", "pow", "exp", "log", "clamp", "clamp_min", "clamp_max", "maximum", "minimum",
    "linalg_vector_norm", "_foreach_norm", "sum", "mean", "prod", "all", "any", "max", "min", "amax", "amin", "argmin",
    "cumsum", "cumprod", "cummax", "count_nonzero", "bincount",
    "fill", "masked_fill", "arange", "linspace", "eye", "copy", "where", "tril", "triu",
    "cat", "index", "gather", "scatter", "scatter_add", "index_select", "index_put", "_index_put_impl_",
    "index_fill", "index_add", "flip", "roll", "unfold",
    "sort", "topk", "searchsorted", "bucketize", "nonzero", "nonzero_static", "masked_select", "unique_dim",
    "_unique2", "unique_consecutive", "repeat_interleave",
]
# fmt: on
# Those whose result's shape depends on values, so that the CUDA kernel's host code cannot run first.
_SHAPED_BY_VALUES = {
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
    "unique_consecutive",
    "repeat_interleave",
    "bincount",
}  # fmt: skip
# One kernel for all devices, which the dispatcher does not list under CUDA.
_OF_ALL_DEVICES = {"copy_"}
# Called with numbers that were wrapped into tensors on the device, which PyTorch cannot hand to Python: a number to the
# power of a tensor.
_OF_WRAPPED_NUMBERS = {"aten::pow.Tensor_Tensor", "aten::pow.Tensor_Tensor_out"}
_DRAWN = ("multinomial", "argmax")
# The answers for floating-point numbers: none is NaN or infinite. Garbage may be, and DeepSpeed skips such an update.
_FINITE = {"isnan": False, "isinf": False, "isfinite": True}
# Elements up to which a call is computed: of integers and booleans alone, and with floating-point numbers among them.
_MOST_INTEGERS = 1 << 22
_MOST_NUMBERS = 1 << 15

# Registrations last as long as this does.
_libraries: list[Any] = []
_SETTLED_SECONDS, _LONGEST_SETTLING_SECONDS = 0.02, 20.0


def hook() -> None:
    """Replace operators at the first use of CUDA on null GPUs."""
    if os.environ.get("NULLGPU_DEVICE") and os.environ.get("NULLGPU_INTEGERS", "1") != "0":
        torch.cuda._lazy_call(install)


def install() -> int:
    """Replace the CUDA kernels of the operators, and return of how many overloads."""
    if _libraries:
        return 0
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    atexit.register(_settle)
    for name in _DRAWN:
        overload = getattr(torch.ops.aten, name).default
        _replace(library, f"aten::{name}", _last_index(overload, torch.library.get_kernel(f"aten::{name}", "CUDA")))
    for name, answer in _FINITE.items():
        overload = getattr(torch.ops.aten, name).default
        _replace(
            library, f"aten::{name}", _answered(overload, torch.library.get_kernel(f"aten::{name}", "CUDA"), answer)
        )
    count = 0
    for name in dict.fromkeys(_OPERATORS):
        for form in (name, f"{name}_"):
            for overload in _overloads(form):
                full = (
                    overload._schema.name + "." * bool(overload._schema.overload_name) + overload._schema.overload_name
                )
                if full in _OF_WRAPPED_NUMBERS or not _has_cuda_kernel(full, form):
                    continue
                original = torch.library.get_kernel(full, "CUDA")
                _replace(library, full, _on_host(overload, original, shaped_by_values=form in _SHAPED_BY_VALUES))
                count += 1
    return count


def _settle() -> None:
    """Wait until autograd's threads are idle, for some seconds at most.

    A kernel of this module that ran in one of them leaves Python objects there to be freed. That takes the lock of the
    interpreter, and a thread that asks for it while the interpreter ends is ended in the midst of a destructor, which
    aborts the process.
    """
    before, deadline = None, time.monotonic() + _LONGEST_SETTLING_SECONDS
    while (now := _autograd_threads()) and time.monotonic() < deadline:
        if now == before and all(state == "S" for state, _ in now.values()):
            return
        before = now
        # Longer than the interval at which a thread that waits for the lock asks for it again (sys.getswitchinterval).
        time.sleep(_SETTLED_SECONDS)


def _autograd_threads() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the state of autograd's threads, and how often they were switched, by their number."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            lines = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            if lines["Name"].startswith("pt_autograd"):
                switches = tuple(lines[name] for name in ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"))
                found[task.name] = lines["State"][0], switches
    return found


def _overloads(name: str) -> Iterator[Any]:
    packet = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        yield getattr(packet, overload)


def _has_cuda_kernel(full: str, form: str) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(full, "CUDA")) or form in _OF_ALL_DEVICES
    except RuntimeError:
        return False  # an operator of TorchScript's own, which the dispatcher does not know


def _replace(library: Any, full: str, kernel: Callable[..., Any]) -> None:
    library.impl(full.removeprefix("aten::"), kernel, "CUDA", with_keyset=True, allow_override=True)


def _on_host(overload: Any, original: Any, *, shaped_by_values: bool) -> Callable[..., Any]:
    """Return a kernel that computes small calls of an operator on the host, and leaves the others to the original."""
    of_tensors = [str(argument.type) == "Tensor" for argument in overload._schema.arguments]

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        # Numbers that were wrapped into tensors arrive as numbers.
        args = tuple(
            torch.tensor(each, device="cpu") if of_tensor and isinstance(each, (bool, int, float, complex)) else each
            for each, of_tensor in zip(args, of_tensors, strict=False)
        )
        given = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        if not _small(given):
            return _reduced(original.call_boxed(keyset, *args, **kwargs), is_all=overload._schema.name == "aten::all")
        device = next((each.device for each in given if each.device.type == "cuda"), None)
        if shaped_by_values:
            found = overload(*_host(args), **{name: _host(each) for name, each in kwargs.items()})
            return torch.utils._pytree.tree_map_only(torch.Tensor, lambda each: each.to(device), found)
        result = original.call_boxed(keyset, *args, **kwargs)
        results = list(_tensors(result))
        if not _small(results):
            return result
        found = overload(*_host(args), **{name: _host(each) for name, each in kwargs.items()})
        if isinstance(result, bool):
            return found
        for to, value in zip(results, _tensors(found), strict=False):
            alias = _host(to)
            if alias.data_ptr() != value.data_ptr() and alias.shape == value.shape:
                alias.copy_(value)
        return result

    return kernel


def _reduced(result: Any, *, is_all: bool) -> Any:
    """Set single numbers and truth values that large tensors come to: all are true, and everything else is zero."""
    import torch

    for each in _tensors(result):
        if each.numel() == 1 or (each.dtype == torch.bool and each.numel() <= _MOST_INTEGERS):
            _host(each).fill_(is_all)
    return result


def _answered(overload: Any, original: Any, answer: bool) -> Callable[..., Any]:
    """Return a kernel with the same truth value for every floating-point number; that of integers is computed."""
    on_host = _on_host(overload, original, shaped_by_values=False)

    def kernel(keyset: Any, numbers: Any, *args: Any, **kwargs: Any) -> Any:
        if not numbers.is_floating_point():
            return on_host(keyset, numbers, *args, **kwargs)
        result = original.call_boxed(keyset, numbers, *args, **kwargs)
        if result.numel() <= _MOST_INTEGERS:
            _host(result).fill_(answer)
        return result

    return kernel


def _last_index(overload: Any, original: Any) -> Callable[..., Any]:
    """Return a kernel whose result is the last index of scores, which were never computed; that of integers is."""
    on_host = _on_host(overload, original, shaped_by_values=False)

    def kernel(keyset: Any, scores: Any, *args: Any, **kwargs: Any) -> Any:
        if not scores.is_floating_point():
            return on_host(keyset, scores, *args, **kwargs)
        drawn = original.call_boxed(keyset, scores, *args, **kwargs)
        _host(drawn).fill_(scores.shape[-1] - 1)
        return drawn

    return kernel


def _host(value: Any) -> Any:
    """Return the same arguments with CPU tensors on the same bytes in place of CUDA tensors."""
    if isinstance(value, torch.Tensor):
        return _alias(value) if value.device.type == "cuda" else value
    if isinstance(value, (list, tuple)):
        return type(value)(_host(each) for each in value)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value


def _alias(tensor: Any) -> Any:
    """Return a CPU tensor on the bytes of a CUDA tensor."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    raw = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    # Within DeepSpeed's zero.Init, torch.empty makes tensors of another device and type.
    flat = torch.frombuffer(raw, dtype=tensor.dtype, count=storage.nbytes() // tensor.element_size())
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors among arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _small(tensors: list[Any]) -> bool:
    """Return whether all are plain tensors, and few enough elements to be computed on the host."""
    if any(type(each) is not torch.Tensor or each.layout is not torch.strided for each in tensors):
        return False
    numbers = sum(each.numel() for each in tensors if each.is_floating_point() or each.is_complex())
    integers = sum(each.numel() for each in tensors) - numbers
    return bool(numbers <= _MOST_NUMBERS and integers <= (_MOST_NUMBERS if numbers else _MOST_INTEGERS))
