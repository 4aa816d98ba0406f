"""The job ``measure_operators``: runs single operators of traces on the real device and times them."""

from __future__ import annotations

import gc
import time
from statistics import median

import torch

from autotune.core.jobs.protocol import OperatorsRequest
from autotune.core.machine import DeviceKind
from autotune.step.distributed.group import select_device
from autotune.step.job import JobContext
from autotune.step.run.meters import METERS, Meter
from autotune.virtual.operators.calls import arguments_of

# An operator is repeated after an uncounted first run, so often and for so long; either maximum ends it. The first runs
# of some wait for new pages of memory, which a training keeps.
_MIN_RUNS, _MAX_RUNS = 5, 9
_MIN_SECONDS, _MAX_SECONDS = 0.002, 0.05
# Larger than the cache of any GPU; written before each run to evict the operator's tensors.
_CACHE_FLUSH_BYTES = 1 << 28


def measure_operators(request: OperatorsRequest, _context: JobContext) -> dict[str, float | None]:
    """Measure the request's calls, in order, until its time is up; a call that fails has None.

    After a kernel failure on a GPU, the remaining calls are skipped: the process can run nothing more on the device.
    """
    deadline = time.monotonic() + request.seconds
    select_device(request.device)
    meter = METERS[request.device]()
    if request.limit_bytes is not None:
        meter.limit(request.limit_bytes)
    seconds: dict[str, float | None] = {}
    with torch.no_grad():
        for call in request.calls:
            if time.monotonic() > deadline:
                break
            try:
                seconds[call] = _measure_seconds(call, request.device, meter) or None
            except Exception:  # noqa: BLE001 an operator may refuse made-up values in any way, and has no time then
                seconds[call] = None
                gc.collect()
                if not _is_usable(meter):
                    break
    meter.lift_limit()
    return seconds


def _is_usable(meter: Meter) -> bool:
    try:
        meter.synchronize()
    except Exception:  # noqa: BLE001 after any error, this process cannot use the device
        return False
    return True


def _measure_seconds(call: str, device: DeviceKind, meter: Meter) -> float:
    func, args, kwargs = arguments_of(call, torch.device(device))
    cache_flush = torch.empty(_CACHE_FLUSH_BYTES, dtype=torch.uint8, device=device) if device == "cuda" else None

    def run() -> float:
        if cache_flush is not None:
            cache_flush.zero_()
        begin = meter.mark()
        func(*args, **kwargs)
        end = meter.mark()
        meter.synchronize()
        return end.seconds_after(begin)

    first = run()
    times: list[float] = []
    while (runs := len(times)) < _MAX_RUNS and (spent := sum(times)) < _MAX_SECONDS:
        if runs >= _MIN_RUNS and spent >= max(_MIN_SECONDS, first):
            break
        times.append(run())
    return median(times)
