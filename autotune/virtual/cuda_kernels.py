"""Runs the operators that are one kernel on CUDA and a composite elsewhere as one operator on the virtual GPU.

PyTorch registers operators such as ``silu_backward`` with a kernel per backend and, for backends without one, a
composite of other operators (``CompositeImplicitAutograd`` in ``aten/src/ATen/native/native_functions.yaml``). The
composite runs before any dispatch mode sees the operator, with temporaries that CUDA's kernel does not have. Only the
dispatcher of a CUDA build has the kernels for CUDA, so their names are listed here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

KERNELS = ("aten::_fused_rms_norm", "aten::mish_backward", "aten::silu_backward")
"""Names of the operators that have a kernel on CUDA and are a composite elsewhere, in PyTorch 2.11 to 2.15."""
COMPOSITE = "CompositeImplicitAutograd"


@cache
def register_cuda_kernels() -> torch.library.Library:
    """Register a kernel for the virtual device, once, for each of :data:`KERNELS`; the caller keeps the library alive.

    PyTorch then skips the composite, and the operator reaches the dispatch mode of a trace as on CUDA, which takes its
    results from the fake kernel: outputs without temporaries. Operators that this PyTorch does not have, or has no
    composite for, are left out.
    """
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name in KERNELS:
        if torch._C._dispatch_has_kernel(name) and has_kernel(name, COMPOSITE):
            library.impl(name.removeprefix("aten::"), _unreachable(name))
    return library


def _unreachable(name: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{name} runs on the virtual device inside a trace only.")

    return kernel


def has_kernel(name: str, key: str) -> bool:
    """Return whether an operator of this PyTorch has a kernel for a dispatch key."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))
