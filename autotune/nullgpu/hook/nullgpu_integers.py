"""Computes operators on small or integer tensors on the host, because a program's branches and shapes depend on them.

Device memory of a null GPU is host memory, so an operator's CPU kernel can write the result there. The CUDA kernel's
host code runs first, so that it allocates as on a GPU. Results of large floating-point tensors stay uninitialised
memory, except that sampling from such a tensor, or its argmax, gives the last index, which is a valid token.

PyTorch calls :func:`hook` at the end of ``import torch``: ``nullgpu-0.dist-info`` declares it as an entry point of the
group ``torch.backends``. The first use of CUDA replaces the operators. ``NULLGPU_INTEGERS=0`` disables this.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

# Operators, in-place forms included, whose results programs read.
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
    "random", "randperm", "uniform", "normal", "bernoulli", "exponential",
]
# fmt: on
# Operators whose output shape depends on values, so that the CUDA kernel's host code cannot run first.
_DATA_DEPENDENT_SHAPES = {
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
    "unique_consecutive",
    "repeat_interleave",
    "bincount",
}  # fmt: skip
# Operators with one kernel for all devices, which the dispatcher does not list under CUDA.
_DEVICE_INDEPENDENT = {"copy_"}
# Overloads that PyTorch calls with a number wrapped into a device tensor (2 ** tensor), which it cannot pass to Python.
_WRAPPED_NUMBER_OVERLOADS = {"aten::pow.Tensor_Tensor", "aten::pow.Tensor_Tensor_out"}
_INDEX_OPERATORS = ("multinomial", "argmax")
# Results for floating-point numbers: uninitialised memory may be NaN or infinite, and DeepSpeed would skip the update.
_FINITE = {"isnan": False, "isinf": False, "isfinite": True}
# Most elements of a computed call: of integers and booleans alone, and if there are floating-point numbers among them.
_MAX_INTEGERS = 1 << 22
_MAX_FLOATS = 1 << 15

# Keeps the registrations alive.
_libraries: list[Any] = []
_generator = torch.Generator()
_POLL_SECONDS, _MAX_WAIT_SECONDS = 0.02, 20.0


def hook() -> None:
    """Replace operators at the first use of CUDA on null GPUs."""
    if os.environ.get("NULLGPU_DEVICE") and os.environ.get("NULLGPU_INTEGERS", "1") != "0":
        torch.cuda._lazy_call(install)


def install() -> int:
    """Replace the CUDA kernels of the operators; return the number of overloads."""
    if _libraries:
        return 0
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    atexit.register(_wait_for_autograd_threads)
    for name in _INDEX_OPERATORS:
        overload, original = getattr(torch.ops.aten, name).default, torch.library.get_kernel(f"aten::{name}", "CUDA")
        _replace(library, f"aten::{name}", _last_index_kernel(overload, original))
    for name, answer in _FINITE.items():
        overload, original = getattr(torch.ops.aten, name).default, torch.library.get_kernel(f"aten::{name}", "CUDA")
        _replace(library, f"aten::{name}", _constant_kernel(overload, original, answer))
    read = torch.library.get_kernel("aten::_local_scalar_dense", "CUDA")
    _replace(library, "aten::_local_scalar_dense", _finite_number_kernel(read))
    count = 0
    for name in dict.fromkeys(_OPERATORS):
        for operator in (name, f"{name}_"):
            for overload in _overloads(operator):
                schema = overload._schema
                full_name = schema.name + "." * bool(schema.overload_name) + schema.overload_name
                if full_name in _WRAPPED_NUMBER_OVERLOADS or not _has_cuda_kernel(full_name, operator):
                    continue
                original = torch.library.get_kernel(full_name, "CUDA")
                by_value = operator in _DATA_DEPENDENT_SHAPES
                _replace(library, full_name, _host_kernel(overload, original, data_dependent_shape=by_value))
                count += 1
    return count


def _wait_for_autograd_threads() -> None:
    """Wait until autograd's threads are idle, for 20 s at most.

    A kernel of this module that ran in such a thread leaves Python objects to free there, which needs the GIL. CPython
    ends a thread that requests the GIL during finalization; inside a C++ destructor that aborts the process.
    """
    previous, deadline = None, time.monotonic() + _MAX_WAIT_SECONDS
    while (current := _autograd_threads()) and time.monotonic() < deadline:
        if current == previous and all(state == "S" for state, _ in current.values()):
            return
        previous = current
        # Longer than the interval at which a waiting thread requests the GIL again (sys.getswitchinterval).
        time.sleep(_POLL_SECONDS)


def _autograd_threads() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the state and the context switches of autograd's threads, by thread number."""
    threads = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            lines = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            if lines["Name"].startswith("pt_autograd"):
                switches = tuple(lines[name] for name in ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"))
                threads[task.name] = lines["State"][0], switches
    return threads


def _overloads(name: str) -> Iterator[Any]:
    packet = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        yield getattr(packet, overload)


def _has_cuda_kernel(full_name: str, operator: str) -> bool:
    try:
        # The dispatcher comes first: it raises an error for an overload that it does not have.
        return torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CUDA") or operator in _DEVICE_INDEPENDENT
    except RuntimeError:
        return False  # an operator of TorchScript alone, without an entry in the dispatcher


def _replace(library: Any, full_name: str, kernel: Callable[..., Any]) -> None:
    library.impl(full_name.removeprefix("aten::"), kernel, "CUDA", with_keyset=True, allow_override=True)


def _host_kernel(overload: Any, original: Any, *, data_dependent_shape: bool) -> Callable[..., Any]:
    """Return a kernel that computes small calls of an operator on the host and passes the others to the original."""
    takes_tensor = [str(argument.type) == "Tensor" for argument in overload._schema.arguments]
    # The script's own generator of the CPU draws the order of its rows.
    generator = {"generator": _generator} if "generator" in (each.name for each in overload._schema.arguments) else {}

    def on_host(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return overload(*_to_host(args), **{name: _to_host(each) for name, each in kwargs.items()} | generator)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        # PyTorch unwraps numbers that it had wrapped into tensors.
        args = tuple(
            torch.tensor(each, device="cpu") if is_tensor and isinstance(each, (bool, int, float, complex)) else each
            for each, is_tensor in zip(args, takes_tensor, strict=False)
        )
        tensors = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        if not _is_small(tensors):
            return _set_results(original.call_boxed(keyset, *args, **kwargs), overload._schema.name == "aten::all")
        device = next((each.device for each in tensors if each.device.type == "cuda"), None)
        if data_dependent_shape:
            host_result = on_host(args, kwargs)
            return torch.utils._pytree.tree_map_only(torch.Tensor, lambda each: each.to(device), host_result)
        result = original.call_boxed(keyset, *args, **kwargs)
        results = list(_tensors(result))
        if not _is_small(results):
            return result
        host_result = on_host(args, kwargs)
        if isinstance(result, bool):
            return host_result
        for to, value in zip(results, _tensors(host_result), strict=False):
            alias = _to_host(to)
            if alias.data_ptr() != value.data_ptr() and alias.shape == value.shape:
                alias.copy_(value)
        return result

    return kernel


def _set_results(result: Any, is_all: bool) -> Any:
    """Fill scalars, integers and booleans from large tensors: with true for ``aten::all``, else with zero.

    Zero is a valid index, such as that of an expert which has one of the largest scores.
    """
    for each in _tensors(result):
        if each.numel() == 1 or (not each.is_floating_point() and each.numel() <= _MAX_INTEGERS):
            _to_host(each).fill_(is_all)
    return result


def _constant_kernel(overload: Any, original: Any, answer: bool) -> Callable[..., Any]:
    """Return a kernel with one truth value for all floating-point numbers; computes those of integers."""
    host_kernel = _host_kernel(overload, original, data_dependent_shape=False)

    def kernel(keyset: Any, numbers: Any, *args: Any, **kwargs: Any) -> Any:
        if not numbers.is_floating_point():
            return host_kernel(keyset, numbers, *args, **kwargs)
        result = original.call_boxed(keyset, numbers, *args, **kwargs)
        if result.numel() <= _MAX_INTEGERS:
            _to_host(result).fill_(answer)
        return result

    return kernel


def _finite_number_kernel(original: Any) -> Callable[..., Any]:
    """Return a kernel that reads a number of the device and gives 0 in place of one that is not finite.

    Scripts end themselves at a loss that is not finite, which uninitialised memory may be.
    """

    def kernel(keyset: Any, number: Any) -> Any:
        value = original.call_boxed(keyset, number)
        return 0.0 if isinstance(value, float) and not math.isfinite(value) else value

    return kernel


def _last_index_kernel(overload: Any, original: Any) -> Callable[..., Any]:
    """Return a kernel that gives the last index for floating-point scores; computes those of integers."""
    host_kernel = _host_kernel(overload, original, data_dependent_shape=False)

    def kernel(keyset: Any, scores: Any, *args: Any, **kwargs: Any) -> Any:
        if not scores.is_floating_point():
            return host_kernel(keyset, scores, *args, **kwargs)
        indices = original.call_boxed(keyset, scores, *args, **kwargs)
        _to_host(indices).fill_(scores.shape[-1] - 1)
        return indices

    return kernel


def _to_host(value: Any) -> Any:
    """Return the arguments with CUDA tensors replaced by CPU tensors on the same bytes."""
    if isinstance(value, torch.Tensor):
        return _alias(value) if value.device.type == "cuda" else value
    if isinstance(value, (list, tuple)):
        return type(value)(_to_host(each) for each in value)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value


def _alias(tensor: Any) -> Any:
    """Return a CPU tensor on the bytes of a CUDA tensor."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    raw = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    # DeepSpeed's zero.Init patches torch.empty, which then makes tensors of another device and type.
    flat = torch.frombuffer(raw, dtype=tensor.dtype, count=storage.nbytes() // tensor.element_size())
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors among arguments or results."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _is_small(tensors: list[Any]) -> bool:
    """Return whether all are plain strided tensors with few enough elements to compute on the host."""
    if any(type(each) is not torch.Tensor or each.layout is not torch.strided for each in tensors):
        return False
    floats = sum(each.numel() for each in tensors if each.is_floating_point() or each.is_complex())
    integers = sum(each.numel() for each in tensors) - floats
    return bool(floats <= _MAX_FLOATS and integers <= (_MAX_FLOATS if floats else _MAX_INTEGERS))
