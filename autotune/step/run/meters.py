"""Measures memory peaks and time of a probe's device, and enforces a memory limit."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml
import torch

from autotune.core.machine import DeviceKind
from autotune.core.measurement import Measurement
from autotune.core.status import ProbeStatus
from autotune.errors import InputError
from autotune.inspection.cpu import cpu
from autotune.units import MIB, format_bytes

_RELEASE_SECONDS = 10
"""Time for the driver to free the memory of a killed process."""
_SLACK_BYTES = 256 * MIB
"""Tolerance for growth of other processes' memory, such as a desktop's, and for inaccuracy of the driver's figures."""
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
# Writing this to clear_refs resets the high-water mark to the current resident size (proc(5)).
_RESET_HIGH_WATER = "5"
_STATUS_FIELDS = frozenset({"RssAnon", "RssFile", "RssShmem", "VmData", "VmHWM", "VmRSS"})
_WARM_UP_SIDE = 256


@dataclass(frozen=True)
class Mark:
    """A point in the device's queue of work.

    Attributes:
        host_seconds: on the host's clock; sufficient for a CPU, which executes work synchronously.
        event: a CUDA stream event, which does not require a synchronisation; None for a CPU.
    """

    host_seconds: float
    event: Any = None

    def seconds_after(self, earlier: Mark) -> float:
        """Return the time since an earlier mark of the same meter; call :meth:`Meter.synchronize` first."""
        if self.event is None:
            return self.host_seconds - earlier.host_seconds
        return float(earlier.event.elapsed_time(self.event)) / 1000.0


class Meter(ABC):
    """Measures one device above a baseline, taken at construction: after the imports, before the model is built."""

    @abstractmethod
    def limit(self, limit_bytes: int) -> None:
        """Limit this process to ``limit_bytes`` on the device.

        Raises:
            torch.OutOfMemoryError: it has already allocated more.
        """

    def require(self, limit_bytes: int) -> None:  # noqa: B027 the kernel reclaims memory of a host for a process
        """Check that ``limit_bytes`` of the device are free of other processes' memory.

        Raises:
            InputError: they are not, so an allocation failure would not be due to the candidate.
        """

    def other_causes(self, limit_bytes: int) -> str:
        """Return a description of causes other than the candidate for a failed allocation; empty if there are none."""
        return ""

    def lift_limit(self) -> None:  # noqa: B027 a caching allocator's limit does not apply to host memory
        """Remove a limit that would prevent the report of a failure."""

    def synchronize(self) -> None:  # noqa: B027 a CPU executes work synchronously
        """Wait until the device has completed all its work."""

    @abstractmethod
    def mark(self) -> Mark:
        """Mark the current point in the device's work."""

    @abstractmethod
    def lap(self) -> int:
        """Return the peak in bytes since the last lap; called at the end of a phase of the step program."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """The peak above the baseline: an exception frees tensors as it propagates, so the current value is too low."""

    @property
    def headroom_bytes(self) -> int | None:
        """Bytes left below an enforced limit if it applies to the whole process, else None.

        A caching allocator raises an unambiguous error when memory runs out.
        """
        return None

    @abstractmethod
    def peaks(self) -> Measurement:
        """Return a measurement with status ``ok`` and the peaks so far, without other figures."""


class CpuMeter(Meter):
    """The CPU: resident memory of the process, limited by the kernel.

    Linux only. Counts the resident anonymous memory in ``/proc/self/status``, without shared mappings and pages of
    mapped files (libraries, the tokenised rows): the kernel can drop those at any time, a forked process maps them
    anew, and the limit excludes them too (``RLIMIT_DATA``, which since Linux 4.7 counts private writable mappings).

    Raises:
        InputError: the kernel does not report this memory, such as gVisor's.
    """

    def __init__(self) -> None:
        _reset_high_water()
        status = _status_bytes()
        if missing := ", ".join(sorted(_STATUS_FIELDS - status.keys())):
            raise InputError(
                f"The memory of a process cannot be measured here: {_STATUS} has no {missing}.",
                hint="Run it outside of a sandbox such as gVisor; a plan measures no memory.",
            )
        self._baseline = _anonymous_bytes(status, "VmRSS")
        self._peak = self._baseline
        self._limit_bytes: int | None = None
        self._rlimit: int | None = None

    def lap(self) -> int:
        """Return the high-water mark since the last lap, in bytes above the baseline, and start a new lap.

        The kernel's mark covers anonymous and file pages together. The current file pages are subtracted, which is
        exact for a lap in which no file was read for the first time, such as every training step but the first.
        """
        status = _status_bytes()
        held_bytes = _anonymous_bytes(status, "VmHWM")
        self._peak = max(self._peak, held_bytes)
        _reset_high_water()
        if self._limit_bytes is not None:
            self._enforce(self._limit_bytes, status)
        return held_bytes - self._baseline

    @property
    def used_bytes(self) -> int:
        """The highest mark of all laps, in bytes above the baseline."""
        self.lap()
        return self._peak - self._baseline

    @property
    def headroom_bytes(self) -> int | None:
        """Bytes that can still be allocated under the enforced limit, or None without a limit."""
        return None if self._rlimit is None else self._rlimit - _status_bytes()["VmData"]

    def limit(self, limit_bytes: int) -> None:
        """Make allocations fail that would exceed ``limit_bytes`` above the baseline."""
        # Start the compute threads first: their stacks do not count as memory of the training.
        side = torch.ones(_WARM_UP_SIDE, _WARM_UP_SIDE)
        (side @ side).exp()
        self._limit_bytes = limit_bytes
        self._enforce(limit_bytes, _status_bytes())

    def _enforce(self, limit_bytes: int, status: Mapping[str, int]) -> None:
        """Set the kernel's limit to the bytes mapped now plus those that may still become resident.

        The kernel counts mapped memory, touched or not, and libraries map memory that they never touch: oneDNN 256 KiB
        of code per primitive, with new primitives for each new row length. Memory that is mapped but not resident at
        the end of a lap is assumed to stay untouched.
        """
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        rlimit = status["VmData"] + max(0, limit_bytes - (status["RssAnon"] - self._baseline))
        self._rlimit = rlimit if hard == resource.RLIM_INFINITY else min(rlimit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (self._rlimit, hard))

    def lift_limit(self) -> None:
        """Remove the limit, so that the failure can be reported."""
        self._limit_bytes = None
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))

    def mark(self) -> Mark:
        """Return the time on the clock of :func:`time.monotonic`."""
        return Mark(time.monotonic())

    def peaks(self) -> Measurement:
        """Return the high-water mark of anonymous resident memory above the baseline."""
        return Measurement(ProbeStatus.OK, peak_bytes=self.used_bytes)


class CudaMeter(Meter):
    """One CUDA device: the caching allocator's statistics and limit, and the driver's figure for the process."""

    def __init__(self) -> None:
        before = _driver_used_bytes()
        # A first product initialises the CUDA context, cuBLAS and its workspace, which every training needs.
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
            # Without NVML, memory of other processes cannot be separated and counts as this process's own.
            free_bytes, total_bytes = torch.cuda.mem_get_info()
            held_bytes = total_bytes - free_bytes
        self._context_bytes = max(0, held_bytes - torch.cuda.memory_reserved())
        del side, _
        # Training gets its workspace at its own first product, after the weights, as without this meter.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._allocated_bytes = self._reserved_bytes = 0
        self._others_before_bytes = self._others_bytes()

    def require(self, limit_bytes: int) -> None:
        """Check that other processes leave ``limit_bytes``; without NVML, their memory is not known."""
        others_bytes = self._others_bytes()
        for _ in range(_RELEASE_SECONDS):
            if limit_bytes + others_bytes <= self._total_bytes + _SLACK_BYTES:
                return
            time.sleep(1.0)
            others_bytes = self._others_bytes()
        raise InputError(
            f"Other processes hold {format_bytes(others_bytes)} of the GPU's {format_bytes(self._total_bytes)}, and "
            f"{format_bytes(limit_bytes)} are needed for a probe.",
            hint="End these processes, then run the command again; a search continues with --resume.",
        )

    def other_causes(self, limit_bytes: int) -> str:
        """Return a description of a growth of memory outside the allocator that leaves less than the limit."""
        before_bytes, others_bytes = self._others_before_bytes, self._others_bytes()
        if others_bytes <= before_bytes or limit_bytes + others_bytes <= self._total_bytes + _SLACK_BYTES:
            return ""
        grown = f"grew from {format_bytes(before_bytes)} to {format_bytes(others_bytes)}"
        return f"; memory of the GPU outside this probe's allocator {grown}, which leaves less than the limit"

    def _others_bytes(self) -> int:
        free_bytes, _ = torch.cuda.mem_get_info()
        if torch.cuda.get_device_properties(torch.cuda.current_device()).is_integrated:
            # CUDA's figure leaves out the host's page cache, which an allocation may take.
            free_bytes = cpu().available_bytes
        own_bytes = self._context_bytes + torch.cuda.memory_reserved()
        return max(0, int(self._total_bytes - free_bytes - own_bytes))

    def limit(self, limit_bytes: int) -> None:
        """Limit context and caching allocator together to ``limit_bytes``.

        Raises:
            torch.OutOfMemoryError: the context alone is larger.
        """
        left_bytes = limit_bytes - self._context_bytes
        if left_bytes <= 0:
            raise torch.OutOfMemoryError(f"the CUDA context alone holds {format_bytes(self._context_bytes)}")
        torch.cuda.set_per_process_memory_fraction(min(1.0, left_bytes / self._total_bytes))

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def mark(self) -> Mark:
        """Record an event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return Mark(time.monotonic(), event)

    def lap(self) -> int:
        """Update the allocator's peaks, and return that of allocated bytes since the last lap."""
        held_bytes = int(torch.cuda.max_memory_allocated())
        self._allocated_bytes = max(self._allocated_bytes, held_bytes)
        self._reserved_bytes = max(self._reserved_bytes, int(torch.cuda.max_memory_reserved()))
        torch.cuda.reset_peak_memory_stats()
        return held_bytes

    @property
    def used_bytes(self) -> int:
        """Peak of bytes allocated by tensors."""
        return max(self._allocated_bytes, int(torch.cuda.max_memory_allocated()))

    def peaks(self) -> Measurement:
        """Return the caching allocator's peaks, and the device's: context plus reserved memory.

        The driver's figure for the process counts if it is larger. It is current, after memory may have been freed, and
        missing in most containers.
        """
        reserved_bytes = max(self._reserved_bytes, int(torch.cuda.max_memory_reserved()))
        return Measurement(
            ProbeStatus.OK,
            peak_bytes=self.used_bytes,
            reserved_bytes=reserved_bytes,
            device_bytes=max(self._context_bytes + reserved_bytes, _driver_process_bytes(self._uuid)),
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
            used[pynvml.nvmlDeviceGetUUID(handle)] = pynvml.nvmlDeviceGetMemoryInfo(handle).used
    return used


def _driver_process_bytes(uuid: str) -> int:
    """Return the driver's figure for this process; 0 without one, as in most containers."""
    with contextlib.suppress(pynvml.NVMLError):
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
    return 0


def _reset_high_water() -> None:
    with contextlib.suppress(OSError):  # without the reset, the mark covers all laps
        _CLEAR_REFS.write_text(_RESET_HIGH_WATER)


def _anonymous_bytes(status: Mapping[str, int], resident: str) -> int:
    """Return the anonymous part of a figure of resident memory, such as ``VmRSS``."""
    return status[resident] - status["RssFile"] - status["RssShmem"]


def _status_bytes() -> dict[str, int]:
    lines = (line.partition(":") for line in _STATUS.read_text(encoding="ascii").splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines if value.endswith("kB")}
