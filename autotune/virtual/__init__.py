"""The virtual accelerator: runs PyTorch training steps on fake tensors, without a GPU, and records their memory use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.virtual.apart import HandOverError
    from autotune.virtual.dispatch import UnknownShapeError
    from autotune.virtual.tracing import (
        adopt,
        assume,
        for_real,
        holds_gradients,
        is_tracing,
        phase,
        settled,
        trace,
        unused_bytes,
    )
    from autotune.virtual.unsupported import UnsupportedError

__all__ = [
    "HandOverError",
    "UnknownShapeError",
    "UnsupportedError",
    "adopt",
    "assume",
    "for_real",
    "holds_gradients",
    "is_tracing",
    "phase",
    "settled",
    "trace",
    "unused_bytes",
]

# By name; any other one is that of a function of tracing.
_MODULES = {"HandOverError": "apart", "UnknownShapeError": "dispatch", "UnsupportedError": "unsupported"}

# A type checker that sees this function accepts every misspelt name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the tracing functions on first use, so that importing the records alone does not import PyTorch."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"autotune.virtual.{_MODULES.get(name, 'tracing')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
