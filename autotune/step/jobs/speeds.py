"""The job ``measure_speeds``: measures matrix products and memory copies on this CPU, in well under a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from autotune.core.gpu import GpuSpeeds
from autotune.core.protocol import SpeedsRequest
from autotune.step.job import JobContext

# Large enough to be compute-bound, small enough to be repeated many times.
_SIDE = 256
# Larger than any cache.
_COPIED_BYTES = 1 << 26


def measure_speeds(request: SpeedsRequest, _context: JobContext) -> GpuSpeeds:
    """Return the best speeds of repeated products and copies, since other load on the machine only slows them."""
    fp32, fp16, bf16 = (_flops(dtype, request.seconds) for dtype in (torch.float32, torch.float16, torch.bfloat16))
    bandwidth = _bandwidth(request.seconds)
    # A CPU has no transfers between host and device.
    return GpuSpeeds(bandwidth, fp32, fp16, bf16, tf32=None, pcie=bandwidth, nvlink=None, source="measured")


def _flops(dtype: torch.dtype, seconds: float) -> float:
    side = torch.ones(_SIDE, _SIDE, dtype=dtype)
    return 2 * _SIDE**3 / _shortest(lambda: side @ side, seconds)


def _bandwidth(seconds: float) -> float:
    source = torch.ones(_COPIED_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / _shortest(lambda: target.copy_(source), seconds)


def _shortest(work: Callable[[], object], seconds: float) -> float:
    """Return the shortest run among those in ``seconds``; the first run, which prepares kernels, is not counted."""
    work()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while not found or time.perf_counter() < end:
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)
