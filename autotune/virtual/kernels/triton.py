"""Triton kernels in a trace: their host code runs and allocates as on a GPU; launches are recorded, not executed."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from autotune.core.step_time import Caller
from autotune.virtual.cost.roofline import Access, Kind, Work
from autotune.virtual.operators.work import access_by_name
from autotune.virtual.patches.libraries import Patches
from autotune.virtual.recording.ledger import Ledger
from autotune.virtual.recording.records import OperatorRecord
from autotune.virtual.recording.tensors import VIRTUAL, type_of_device

_MODULES = ("trl.kernels.chunked_logprob", "trl.kernels.chunked_divergence")
_FUSED_HEAD_FUNCTIONS = {
    "trl.kernels.chunked_logprob": ("_use_triton", "_addmm_fp32"),
    "trl.kernels.chunked_divergence": ("_use_triton", "_addmm_fp32", "_project"),
    "trl.trainer.utils": ("_use_triton",),
    "trl.trainer.distillation_trainer": ("_use_triton",),
}
"""Functions of TRL's modules that check a device for Triton support, or that multiply matrices."""


def triton_launches_recorded(ledger: Ledger) -> Patches:
    """Patch Triton to record kernel launches without executing them, and TRL's fused head to accept the device.

    Triton is a dependency of PyTorch's CUDA builds only, so it may be missing.
    """
    launch = _launching(ledger)
    if importlib.util.find_spec("triton") is not None:
        from triton.runtime.autotuner import Autotuner, Heuristics
        from triton.runtime.jit import JITFunction

        for kind in (JITFunction, Autotuner, Heuristics):
            yield mock.patch.object(kind, "run", launch)
    else:
        for module in (sys.modules[name] for name in _MODULES if name in sys.modules):
            yield from _kernels_stood_in_for(module, launch)
    yield from _fused_head_accepting_the_device()


def _launching(ledger: Ledger) -> Any:
    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        tensors = [tensor for tensor in tensors if type_of_device(tensor) == VIRTUAL]
        if not tensors:
            return
        # The kernel's reads and writes cannot be distinguished; each tensor argument counts as accessed once.
        sizes = [tensor.numel() * tensor.itemsize for tensor in tensors]
        storages = ledger.numbers(tensors)
        since = ledger.recency.since(storages)
        reused = tuple((size, after) for size, after in zip(sizes, since, strict=True) if after is not None)
        elements = max(tensor.numel() for tensor in tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        name = f"triton.{getattr(kernel, '__name__', type(kernel).__name__)}"
        access = access_by_name(name) or Access.POINTWISE
        work = Work(Kind.ELEMENTWISE, dtype, elements, sum(sizes), reused=reused, access=access, caller=Caller.LIBRARY)
        record = OperatorRecord(
            name=name,
            shapes=tuple(tuple(tensor.shape) for tensor in tensors),
            dtypes=tuple(str(tensor.dtype) for tensor in tensors),
            work=work,
            in_backward=torch._C._current_graph_task_id() != -1,
        )
        ledger.ran(record, storages)

    return launch


class _Kernel:
    """Replaces a kernel where Triton is missing, with its launch syntax ``kernel[grid](...)``."""

    def __init__(self, name: str, launch: Any) -> None:
        self.__name__ = name
        self._launch = launch

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return partial(self._launch, self)


def _kernels_stood_in_for(module: ModuleType, launch: Any) -> Patches:
    """Patch a module that was imported without Triton: define the names that its host code uses."""
    triton = SimpleNamespace(cdiv=lambda count, size: -(-count // size))
    yield mock.patch.object(module, "triton", triton, create=True)
    for name, found in list(vars(module).items()):
        if name.endswith("_kernel") and isinstance(found, FunctionType):
            yield mock.patch.object(module, name, _Kernel(name, launch))


def _fused_head_accepting_the_device() -> Patches:
    def has_triton(device: torch.device) -> bool:
        return bool(device.type == VIRTUAL)

    def add_product(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        # On CUDA, cuBLAS multiplies half-precision types into float32 without copies; the product is only recorded.
        if a.dtype == acc.dtype:
            acc.addmm_(a, b)
        else:
            torch.ops.aten.addmm.dtype_out(acc, a, b, torch.float32, out=acc)

    def project(tile: Any, hidden: Any, weight: Any, bias: Any, start: int, end: int, dtype: torch.dtype) -> None:
        # As above, for the logits of a tile.
        chunk = weight[start:end].to(dtype).t()
        if dtype == tile.dtype:
            torch.mm(hidden, chunk, out=tile)
        else:
            torch.ops.aten.mm.dtype_out(hidden, chunk, torch.float32, out=tile)
        if bias is not None:
            tile.add_(bias[start:end].float())

    replaced = {"_use_triton": has_triton, "_addmm_fp32": add_product, "_project": project}
    for name in _FUSED_HEAD_FUNCTIONS.keys() & sys.modules.keys():
        for function in _FUSED_HEAD_FUNCTIONS[name]:
            yield mock.patch.object(sys.modules[name], function, replaced[function])
