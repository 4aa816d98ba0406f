"""The virtual accelerator: any PyTorch training step, run with no GPU and no storage, tells what memory it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.virtual.tracing import adopt, assume, for_real, phase, settled, trace

__all__ = ["adopt", "assume", "for_real", "phase", "settled", "trace"]


def __getattr__(name: str) -> object:
    """Import PyTorch where tracing is wanted, not where only the records are."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from autotune.virtual import tracing

    return getattr(tracing, name)
