"""Meters of a probe's device: what it holds, what it held at the most, and a limit that makes it fail for real."""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pynvml
import torch

from autotune.core.machine import DeviceKind
from autotune.step.run.host_memory import HostMemory
from autotune.units import format_bytes


@dataclass(frozen=True)
class Peaks:
    """High-water marks, named as in :class:`autotune.core.measurement.Measurement`."""

    peak_bytes: int
    reserved_bytes: int | None
    device_bytes: int | None
    host_peak_bytes: int
    allocation_retries: int | None


class Mark(Protocol):
    """A point in the work that the device was asked for."""

    def seconds_after(self, earlier: Any) -> float:
        """Return the time since an earlier mark of the same meter; asked after :meth:`Meter.synchronize`."""


@dataclass(frozen=True)
class HostMark:
    """A point on the host's clock, which is the device's where the CPU does what it is asked for at once."""

    seconds: float

    def seconds_after(self, earlier: HostMark) -> float:
        """Return the seconds between."""
        return self.seconds - earlier.seconds


@dataclass(frozen=True)
class CudaMark:
    """A point in a CUDA stream: it costs no synchronisation, which would hold up what follows."""

    event: Any

    def seconds_after(self, earlier: CudaMark) -> float:
        """Return the seconds between; the stream has passed both."""
        return float(earlier.event.elapsed_time(self.event)) / 1000.0


class Meter(ABC):
    """Measures one device from a baseline, which is taken when it is made: after the imports, before the model."""

    @abstractmethod
    def limit(self, limit_bytes: int) -> None:
        """Let this process hold no more than ``limit_bytes`` on the device.

        Raises:
            MemoryError: what it holds already is more.
        """

    @abstractmethod
    def lift_limit(self) -> None:
        """Take back a limit that keeps what happened from being told."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all that it was asked for."""

    @abstractmethod
    def mark(self) -> Mark:
        """Mark where the device's work is now."""

    @abstractmethod
    def lap(self) -> int:
        """Return the most bytes that were held since the last lap; called where a phase of the program ends."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """What the process held above its baseline at the most: an exception frees tensors on its way up."""

    @property
    @abstractmethod
    def headroom_bytes(self) -> int | None:
        """What an enforced limit leaves where it binds the whole process and not one allocator alone, or None."""

    @abstractmethod
    def peaks(self) -> Peaks:
        """Return the high-water marks so far."""


class CpuMeter(Meter):
    """The CPU: resident memory of the process, limited by the kernel."""

    def __init__(self) -> None:
        self._host = HostMemory()

    def limit(self, limit_bytes: int) -> None:
        """Let this process hold no more than ``limit_bytes`` above its baseline."""
        self._host.limit(limit_bytes)

    def lift_limit(self) -> None:
        """Take back the limit."""
        self._host.lift_limit()

    def synchronize(self) -> None:
        """Do nothing: a CPU does what it is asked for at once."""

    def mark(self) -> HostMark:
        """Return the time on the clock of :func:`time.monotonic`."""
        return HostMark(time.monotonic())

    def lap(self) -> int:
        """Take in the high-water mark of the process, and return it."""
        return self._host.lap()

    @property
    def held_bytes(self) -> int:
        """High-water of anonymous resident bytes above the baseline."""
        return self._host.peak_bytes

    @property
    def headroom_bytes(self) -> int | None:
        """What the limit leaves to allocate."""
        return self._host.headroom_bytes

    def peaks(self) -> Peaks:
        """Return the high-water of anonymous resident memory above the baseline."""
        peak_bytes = self._host.peak_bytes
        return Peaks(peak_bytes, None, None, peak_bytes, None)


class CudaMeter(Meter):
    """One CUDA device: the caching allocator's own statistics and limit, and the driver's view of the process."""

    def __init__(self) -> None:
        self._host = HostMemory()
        before = _driver_used_bytes()
        # A first product loads what every training needs besides its tensors: context, cuBLAS and its workspace.
        side = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
        _ = side @ side
        torch.cuda.synchronize()
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self._total_bytes = properties.total_memory
        self._uuid = f"GPU-{properties.uuid}"
        used_bytes = _driver_used_bytes().get(self._uuid)
        if used_bytes is not None and self._uuid in before:
            held_bytes = used_bytes - before[self._uuid]
        else:
            # Without NVML others' memory cannot be told from this process's, and counts as its own.
            free_bytes, total_bytes = torch.cuda.mem_get_info()
            held_bytes = total_bytes - free_bytes
        self._context_bytes = max(0, held_bytes - torch.cuda.memory_reserved())
        del side, _
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._allocated_bytes = self._reserved_bytes = 0

    def limit(self, limit_bytes: int) -> None:
        """Let context and caching allocator together hold no more than ``limit_bytes``.

        Raises:
            MemoryError: the context alone holds more.
        """
        left_bytes = limit_bytes - self._context_bytes
        if left_bytes <= 0:
            raise MemoryError(f"the CUDA context alone holds {format_bytes(self._context_bytes)}")
        torch.cuda.set_per_process_memory_fraction(min(1.0, left_bytes / self._total_bytes))

    def lift_limit(self) -> None:
        """Do nothing: the limit binds the caching allocator alone."""

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def mark(self) -> CudaMark:
        """Record an event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return CudaMark(event)

    def lap(self) -> int:
        """Take in the high-water marks of the process on the host and of the allocator; return the allocator's."""
        self._host.lap()
        held_bytes = int(torch.cuda.max_memory_allocated())
        self._allocated_bytes = max(self._allocated_bytes, held_bytes)
        self._reserved_bytes = max(self._reserved_bytes, int(torch.cuda.max_memory_reserved()))
        torch.cuda.reset_peak_memory_stats()
        return held_bytes

    @property
    def held_bytes(self) -> int:
        """Peak of bytes allocated by tensors."""
        return max(self._allocated_bytes, int(torch.cuda.max_memory_allocated()))

    @property
    def headroom_bytes(self) -> int | None:
        """None: the allocator says by itself when memory ran out."""
        return None

    def peaks(self) -> Peaks:
        """Return the caching allocator's peaks, and what the driver says this process holds."""
        return Peaks(
            peak_bytes=self.held_bytes,
            reserved_bytes=max(self._reserved_bytes, int(torch.cuda.max_memory_reserved())),
            device_bytes=_driver_process_bytes(self._uuid),
            host_peak_bytes=self._host.peak_bytes,
            allocation_retries=torch.cuda.memory_stats().get("num_alloc_retries"),
        )


METERS: Mapping[DeviceKind, type[Meter]] = {"cpu": CpuMeter, "cuda": CudaMeter}
"""The meter of each kind of device."""


def _driver_used_bytes() -> dict[str, int]:
    """Return the bytes in use on each GPU, by its UUID; does not touch CUDA. Empty without NVML."""
    used: dict[str, int] = {}
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            used[_text(pynvml.nvmlDeviceGetUUID(handle))] = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    return used


def _driver_process_bytes(uuid: str) -> int | None:
    """Return what the driver says this process holds, or None where it cannot say, as in most containers."""
    with contextlib.suppress(pynvml.NVMLError):
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
    return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
