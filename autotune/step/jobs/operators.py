"""The job ``measure_operators``: runs single operators of traces on the real device and times them."""

from __future__ import annotations

import gc
import time
from statistics import median

import torch

from autotune.core.machine import DeviceKind
from autotune.core.protocol import OperatorsReply, OperatorsRequest
from autotune.step.distributed.group import select_device
from autotune.step.job import JobContext
from autotune.step.run.meters import METERS, Meter
from autotune.virtual.calls import arguments_of

# An operator is repeated after its first run, which is not counted, for at least this time, at most this often.
_MOST_RUNS = 9
_LEAST_SECONDS = 0.002
# Larger than the cache of any GPU; written before each run to evict the operator's tensors.
_FLUSHED_BYTES = 1 << 28


def measure_operators(request: OperatorsRequest, _context: JobContext) -> OperatorsReply:
    """Return the seconds of each call, in order, until the time is up; None for a call that fails.

    After a kernel failure on a GPU, the remaining calls are skipped: the process can run nothing more on the device.
    """
    end = time.monotonic() + request.seconds
    select_device(request.device)
    meter = METERS[request.device]()
    if request.limit_bytes is not None:
        meter.limit(request.limit_bytes)
    found: dict[str, float | None] = {}
    with torch.no_grad():
        for call in request.calls:
            if time.monotonic() > end:
                break
            try:
                found[call] = _seconds(call, request.device, meter) or None
            except Exception:  # noqa: BLE001 an operator may refuse made-up values in any way, and has no time then
                found[call] = None
                gc.collect()
                if not _works(meter):
                    break
    meter.lift_limit()
    return OperatorsReply(found)


def _works(meter: Meter) -> bool:
    try:
        meter.synchronize()
    except Exception:  # noqa: BLE001 after any error, this process cannot use the device
        return False
    return True


def _seconds(call: str, device: DeviceKind, meter: Meter) -> float:
    func, args, kwargs = arguments_of(call, torch.device(device))
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device) if device == "cuda" else None

    def run() -> float:
        if flushed is not None:
            flushed.zero_()
        begun = meter.mark()
        func(*args, **kwargs)
        ended = meter.mark()
        meter.synchronize()
        return ended.seconds_after(begun)

    first = run()
    found: list[float] = []
    while not found or (len(found) < _MOST_RUNS and sum(found) < max(_LEAST_SECONDS, first)):
        found.append(run())
    return median(found)
