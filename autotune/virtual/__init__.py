"""The virtual accelerator: runs PyTorch training steps on fake tensors, without a GPU, and records their memory use."""

from autotune.virtual.cost.roofline import step_seconds
from autotune.virtual.engine.apart import HandOverError
from autotune.virtual.engine.dispatch import UnknownShapeError
from autotune.virtual.engine.tracing import (
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
from autotune.virtual.patches.unsupported import UnsupportedError
from autotune.virtual.recording.replay import replay

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
    "replay",
    "settled",
    "step_seconds",
    "trace",
    "unused_bytes",
]


def __dir__() -> list[str]:
    return sorted(__all__)
