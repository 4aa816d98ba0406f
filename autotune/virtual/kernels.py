"""Triton kernels in a trace: their host code runs and allocates as on a GPU, their launches do nothing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def launching_nothing(device_type: str) -> Iterator[None]:
    """Have launches of Triton kernels do nothing, and TRL's fused head take a device for one that has Triton."""
    with ExitStack() as stack:
        if importlib.util.find_spec("triton") is not None:
            from triton.runtime.autotuner import Autotuner, Heuristics
            from triton.runtime.jit import JITFunction

            for kind in (JITFunction, Autotuner, Heuristics):
                stack.enter_context(mock.patch.object(kind, "run", _launch))
        _patch_fused_head(stack, device_type)
        yield


def _launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
    pass


def _patch_fused_head(stack: ExitStack, device_type: str) -> None:
    def has_triton(device: torch.device) -> bool:
        return bool(device.type == device_type)

    def add_product(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        # On CUDA, cuBLAS multiplies half types into float32 with no copies; the product itself is only noted.
        if a.dtype == acc.dtype:
            acc.addmm_(a, b)
        else:
            torch.ops.aten.addmm.dtype_out(acc, a, b, torch.float32, out=acc)

    for name in ("trl.kernels.chunked_logprob", "trl.trainer.utils"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "_use_triton"):
            stack.enter_context(mock.patch.object(module, "_use_triton", has_triton))
    module = sys.modules.get("trl.kernels.chunked_logprob")
    if module is not None and hasattr(module, "_addmm_fp32"):
        stack.enter_context(mock.patch.object(module, "_addmm_fp32", add_product))
