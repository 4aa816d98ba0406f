"""The virtual accelerator: runs PyTorch training steps on fake tensors, without a GPU, and records their memory use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

__all__ = ["adopt", "assume", "for_real", "holds_gradients", "is_tracing", "phase", "settled", "trace", "unused_bytes"]


def __getattr__(name: str) -> object:
    """Import the tracing functions on first use, so that importing the records alone does not import PyTorch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autotune.virtual import tracing

    return getattr(tracing, name)
