"""The virtual accelerator: runs PyTorch training steps on fake tensors, without a GPU, and records their memory use."""

from autotune.virtual.apart import HandOverError
from autotune.virtual.dispatch import UnknownShapeError
from autotune.virtual.tracing import (
    adopt,
    assume,
    for_real,
    holds,
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
    "holds",
    "is_tracing",
    "phase",
    "settled",
    "trace",
    "unused_bytes",
]


def __dir__() -> list[str]:
    return sorted(__all__)
