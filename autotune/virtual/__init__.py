"""The virtual accelerator: runs PyTorch training steps on fake tensors, without a GPU, and records their memory use."""

from autotune.virtual.cost.roofline import step_seconds
from autotune.virtual.engine.dispatch import UnknownShapeError
from autotune.virtual.engine.subprocess_trace import PicklingError
from autotune.virtual.engine.tracing import (
    assume,
    is_tracing,
    mark_gradient_final,
    on_real_tensors,
    phase,
    set_category,
    trace,
    trace_inputs,
    unused_bytes,
)
from autotune.virtual.patches.unsupported import UnsupportedError
from autotune.virtual.recording.replay import replay

__all__ = [
    "PicklingError",
    "UnknownShapeError",
    "UnsupportedError",
    "assume",
    "is_tracing",
    "mark_gradient_final",
    "on_real_tensors",
    "phase",
    "replay",
    "set_category",
    "step_seconds",
    "trace",
    "trace_inputs",
    "unused_bytes",
]


def __dir__() -> list[str]:
    return sorted(__all__)
