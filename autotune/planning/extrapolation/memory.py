"""From forecasts of tensors to what a device has to have."""

from __future__ import annotations

from autotune.core.estimate import MemoryEstimate
from autotune.core.gpu import Gpu
from autotune.planning.extrapolation.forecast import Forecast

TRACED_ERROR = 0.10
"""What a traced estimate may be off by, as a share. Tensors' bytes of a trace are within 3 % on the CPU, and
follow full-size traces within 0.5 %; what the caching allocator reserves does so within 10 % on small models and within
5 % on an 8B shape. Of 73 published GPU runs (benchmarks/published), whole traces were up to 9.3 % above and up to
16.9 % below; what is below by more than this is inside it with ``MemoryEstimate.varied_bytes``."""


def memory_estimate(
    worst: Forecast, typical: Forecast, micro_batches: int, gpu: Gpu | None, error: float
) -> MemoryEstimate:
    """Return the estimate for a GPU, or for the CPU's allocator where there is none.

    Args:
        worst: of the largest micro-batch, for memory.
        typical: of a typical one, for time.
        micro_batches: in an optimizer step.
        error: share that it may be off by.
    """
    peak_bytes = worst.peak_bytes + (worst.overhead_bytes if gpu is not None else 0)
    reserved_bytes = peak_bytes + worst.unused_bytes if gpu is not None else None
    context_bytes = gpu.context_bytes if gpu is not None else 0
    extra = {
        "rounding": peak_bytes - worst.peak_bytes,
        "fragmentation": reserved_bytes - peak_bytes if reserved_bytes is not None else 0,
        "context": context_bytes,
    }
    return MemoryEstimate(
        peak_bytes=peak_bytes,
        reserved_bytes=reserved_bytes,
        context_bytes=context_bytes,
        breakdown={**worst.categories, **{name: size for name, size in extra.items() if size}},
        host_bytes=worst.host_bytes,
        step_seconds=typical.step_seconds(micro_batches),
        error=error,
    )
