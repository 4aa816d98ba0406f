"""Measures the host memory of this process, its high-water mark, and enforces a limit on it.

Linux only. Counted is the resident anonymous memory in ``/proc/self/status``. Pages of mapped files (libraries, the
tokenised rows) are excluded, because the kernel can drop them at any time, because a forked process maps them anew, and
because the limit excludes them too: ``RLIMIT_DATA``, which since Linux 4.7 counts private writable mappings. Memory
that CUDA pins (``cudaHostAlloc``) is a shared anonymous mapping, which the meter of a GPU counts as well.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Mapping
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
# Writing this to clear_refs resets the high-water mark to the current resident size (proc(5)).
_RESET_HIGH_WATER = "5"
_WARM_SIDE = 256


class HostMemory:
    """Measures the memory of this process above a baseline, taken at construction: after the imports.

    Args:
        counts_shared: whether shared mappings count too.
    """

    def __init__(self, *, counts_shared: bool = False) -> None:
        self._uncounted = ("RssFile",) if counts_shared else ("RssFile", "RssShmem")
        _reset_high_water()
        status = _status_bytes()
        self._baseline = status["VmRSS"] - sum(status[name] for name in self._uncounted)
        self._peak = self._baseline
        self._limit_bytes: int | None = None
        self._rlimit: int | None = None

    def lap(self) -> int:
        """Return the high-water mark since the last lap, in bytes above the baseline, and start a new lap.

        The kernel's mark covers anonymous and file pages together. The current file pages are subtracted, which is
        exact for a lap in which no file was read for the first time, such as every training step but the first.
        """
        status = _status_bytes()
        held_bytes = status["VmHWM"] - sum(status[name] for name in self._uncounted)
        self._peak = max(self._peak, held_bytes)
        _reset_high_water()
        if self._limit_bytes is not None:
            self._enforce(self._limit_bytes, status)
        return held_bytes - self._baseline

    @property
    def held_bytes(self) -> int:
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
        side = torch.ones(_WARM_SIDE, _WARM_SIDE)
        (side @ side).exp()
        self._limit_bytes = limit_bytes
        self._enforce(limit_bytes, _status_bytes())

    def _enforce(self, limit_bytes: int, status: Mapping[str, int]) -> None:
        """Set the kernel's limit to the bytes mapped now plus those that may still become resident.

        The kernel counts mapped memory, touched or not, and libraries map much that they never touch: oneDNN 256 KiB
        of code per primitive, with new primitives for each new row length. Memory that is mapped but not resident at
        the end of a lap is assumed to be of that kind.
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


def _reset_high_water() -> None:
    with contextlib.suppress(OSError):  # without the reset, the mark covers all laps
        _CLEAR_REFS.write_text(_RESET_HIGH_WATER)


def _status_bytes() -> dict[str, int]:
    lines = (line.partition(":") for line in _STATUS.read_text(encoding="ascii").splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines if value.endswith("kB")}
