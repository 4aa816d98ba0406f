"""Errors with remedies for code that a trace does not support, and patches for code that it runs differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader

from autotune.virtual.patches.libraries import Patches
from autotune.virtual.recording.records import MemoryEvent, Place
from autotune.virtual.recording.tensors import argument

COMPILED = "a compiled step needs what the same step needs uncompiled"
"""The assumption that a trace of a compiled function makes."""
HUB_KERNELS = "kernels of the Hub need what the layers need that they replace"
"""The assumption of a trace whose model has such kernels (``use_kernels``), since a trace downloads none."""
_USE_THE_DEVICE = "Use the `device` that the traced function gets, not 'cuda'."
_READS_VALUES = "C++ code reads the values of a tensor, which a trace does not have. Use autotune dry-run instead."
_INSTEAD: Mapping[str, str] = {
    "not linked with support for cuda": f"A tensor was moved to a CUDA device. {_USE_THE_DEVICE}",
    "No CUDA GPUs are available": f"The traced function uses CUDA. {_USE_THE_DEVICE}",
    "no CUDA-capable device is detected": f"The traced function uses CUDA. {_USE_THE_DEVICE}",
    "but its data is not allocated yet": _READS_VALUES,
    "Cannot access data pointer of Tensor": _READS_VALUES,
    "Could not run 'aten::empty_strided' with arguments from the 'virtual' backend": (
        "A tensor made outside of the traced function, or read from a file, was moved to the device. Build the model "
        "inside the function, with AutoModelForCausalLM.from_config in place of from_pretrained, and hand data over "
        "with `autotune.virtual.trace_inputs`."
    ),
}
"""Advice by part of an error message of PyTorch."""
_aten = torch.ops.aten
_SPARSE: Mapping[Any, str] = {
    _aten.embedding.default: "sparse",
    _aten._embedding_bag.default: "sparse",
    _aten.gather.default: "sparse_grad",
}
"""Operators whose gradients may be sparse tensors, and the argument that enables this."""


class UnsupportedError(NotImplementedError):
    """The traced function does something that a trace cannot follow; the message has the remedy."""


def refuse_unsupported(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse an operator that a trace cannot run, or whose memory would be counted in the wrong place.

    Raises:
        UnsupportedError: it makes a tensor on a CUDA device, its gradient is sparse, or CUDA has no kernel for it.
    """
    if getattr(kwargs.get("device"), "type", "") == "cuda":
        raise UnsupportedError(f"{func} makes a tensor on a CUDA device. {_USE_THE_DEVICE}")
    # ATen's kernel (native/cuda/AmpKernels.cu) is for float32 and float16; tests/nullgpu/test_training.py
    if func is _aten._amp_foreach_non_finite_check_and_unscale_.default and args[0][0].dtype is torch.bfloat16:
        raise UnsupportedError("CUDA does not scale gradients in bfloat16, as fp16 would.")
    # PyTorch aborts the process if a backward pass creates a sparse fake tensor.
    if func in _SPARSE and torch.is_grad_enabled() and argument(func, args, kwargs, _SPARSE[func]):
        name = _SPARSE[func]
        raise UnsupportedError(f"{func} with {name}=True has a sparse gradient. Use {name}=False in a trace.")


@contextmanager
def errors_explained() -> Iterator[None]:
    """Replace PyTorch's errors about devices by errors with a remedy.

    Raises:
        UnsupportedError: in place of such an error.
    """
    try:
        yield
    except RuntimeError as error:
        instead = next((advice for words, advice in _INSTEAD.items() if words in str(error)), None)
        if instead is None:
            raise
        raise UnsupportedError(instead).with_traceback(error.__traceback__) from None


def refuse_host_only(events: list[MemoryEvent]) -> None:
    """Refuse a trace whose tensors are all on the host.

    Raises:
        UnsupportedError: the host has events, and the device has none.
    """
    if events and all(event.place is Place.HOST for event in events):
        raise UnsupportedError(f"Nothing ran on the device. {_USE_THE_DEVICE}")


def run_otherwise(assume: Callable[[str], None]) -> Patches:
    """Run compiled functions uncompiled, and data loaders without workers, which cannot create a trace's tensors.

    Args:
        assume: counts an assumption.
    """
    compile_, iterator = torch.compile, DataLoader._get_iterator

    def noted(*args: Any, **words: Any) -> Any:
        assume(COMPILED)
        return compile_(*args, **words)

    def in_process(loader: DataLoader[Any]) -> Any:
        if not loader.num_workers:
            return iterator(loader)
        with mock.patch.multiple(loader, num_workers=0, timeout=0):
            return iterator(loader)

    yield torch.compiler.set_stance("force_eager")
    yield mock.patch.object(torch, "compile", noted)
    yield mock.patch.object(DataLoader, "_get_iterator", in_process)
