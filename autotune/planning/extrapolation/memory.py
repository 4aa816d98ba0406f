"""Turns forecasts of tensor bytes into the memory that a device needs."""

from __future__ import annotations

from autotune.core.estimate import MemoryEstimate
from autotune.core.gpu import Gpu
from autotune.core.machine import DeviceKind
from autotune.planning.extrapolation.forecast import Forecast
from autotune.trainers.prompts import GENERATION
from autotune.units import MIB

TRACED_ERROR = 0.10
"""Error of a traced estimate, as a share. Traced tensor bytes are within 3 % on the CPU, and extrapolated ones within
0.5 % of full-size traces; extrapolated reserved bytes of the caching allocator are within 10 % on small models and
within 5 % on an 8B shape. Of 73 published GPU runs (benchmarks/published), whole traces were up to 9.3 % above and up
to 16.9 % below; those below by more than this error are within it once ``MemoryEstimate.varied_bytes`` is added."""

PROCESS_BYTES = 128 * MIB
_PROCESS_SHARE = 0.25
"""Upper bound of what a process on a CPU holds in addition to tensors: this share of them, at most so many bytes.

Measured in real probes as the most that was mapped (VmData, less what each step started with), less the traced peak of
tensors, on 2 threads in float32: a model of 2 layers, 64 wide: 6 MiB with 40 of tensors, and 20 with 153; a
Llama of 13M parameters: 126 MiB with 519, and 89 with 1,389."""


def memory_estimate(
    worst: Forecast, typical: Forecast, micro_batches: int, device: Gpu | None, kind: DeviceKind
) -> MemoryEstimate:
    """Return the estimate for a GPU, or for a CPU and its allocator.

    Args:
        worst: forecast of the largest micro-batch, which gives the memory.
        typical: forecast of a typical one, which gives the time.
        micro_batches: number per optimizer step.
        device: None only for a CPU of which tensors alone count. Of another CPU, ``context_bytes`` is the most that a
            process is expected to hold in addition to its tensors; small models hold less.
    """
    gpu = None if kind == "cpu" else device
    process_bytes = 0 if device is None else device.context_bytes
    peak_bytes = worst.peak_bytes + (worst.overhead_bytes if gpu is not None else 0)
    reserved_bytes = peak_bytes + worst.unused_bytes if gpu is not None else None
    context_bytes = gpu.context_bytes if gpu is not None else min(process_bytes, round(_PROCESS_SHARE * peak_bytes))
    extra = {
        "rounding": peak_bytes - worst.peak_bytes,
        "fragmentation": reserved_bytes - peak_bytes if reserved_bytes is not None else 0,
        "context" if gpu is not None else "process": context_bytes,
    }
    return MemoryEstimate(
        peak_bytes=peak_bytes,
        reserved_bytes=reserved_bytes,
        context_bytes=context_bytes,
        breakdown={**worst.categories, **{name: size for name, size in extra.items() if size}},
        host_bytes=worst.host_bytes,
        machine_bytes=worst.machine_bytes,
        step_seconds=typical.step_seconds(micro_batches),
        error=TRACED_ERROR,
        generation_bytes=_generation_bytes(worst, gpu),
    )


def _generation_bytes(worst: Forecast, gpu: Gpu | None) -> int | None:
    """Return what the device holds at most while completions are generated; None if none are."""
    held = [sum(levels.values()) for (part, _), levels in worst.stretches.items() if part.phase == GENERATION]
    if not held:
        return None
    extra = 0 if gpu is None else round(worst.rounding_share * max(held)) + worst.workspace_bytes + gpu.context_bytes
    return max(held) + extra
