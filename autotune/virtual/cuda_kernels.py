"""Runs the operators that are one kernel on CUDA and a composite elsewhere as one operator on the virtual GPU.

PyTorch registers operators such as ``silu_backward`` with a kernel per backend and, for backends without one, a
composite of other operators (``CompositeImplicitAutograd`` in ``aten/src/ATen/native/native_functions.yaml``). The
composite runs before any dispatch mode sees the operator, with temporaries that CUDA's kernel does not have. Only the
dispatcher of a CUDA build has the kernels for CUDA, so their names are shipped as a table, ``cuda_kernels.yaml``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import torch
import yaml
from packaging.version import Version

TABLE = "cuda_kernels.yaml"
COMPOSITE = "CompositeImplicitAutograd"


def shipped() -> Mapping[str, Sequence[str]]:
    """Return the table: operator names by PyTorch release, such as ``2.13``."""
    return dict(yaml.safe_load(files(__package__).joinpath(TABLE).read_text(encoding="utf-8")))


def release(version: str = torch.__version__) -> str:
    """Return a version's key in the table, such as ``2.13`` for ``2.13.0+cpu``."""
    parsed = Version(version)
    return f"{parsed.major}.{parsed.minor}"


def nearest(known: Iterable[str], wanted: str) -> str:
    """Return the release whose operators stand for those of the release ``wanted``.

    That is ``wanted`` itself if it is known, otherwise the newest one before it, otherwise the oldest one.

    Raises:
        IndexError: none is known.
    """
    ordered = sorted(known, key=Version)
    before = [one for one in ordered if Version(one) <= Version(wanted)]
    return before[-1] if before else ordered[0]


@cache
def register_cuda_kernels() -> torch.library.Library:
    """Register a kernel for the virtual device, once, for each operator in the table; the caller keeps the library.

    PyTorch then skips the composite, and the operator reaches the dispatch mode of a trace as on CUDA, which takes its
    results from the fake kernel: outputs without temporaries. A release without a table takes the nearest one
    (:func:`nearest`); of that, operators that this PyTorch does not have, or has no composite for, are left out.
    """
    library = torch.library.Library("aten", "IMPL", "PrivateUse1")
    table = shipped()
    for name in table[nearest(table, release())]:
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
