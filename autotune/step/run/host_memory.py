"""The memory of this process on the host: what it holds, its high-water mark, and a limit that makes it fail for real.

Linux only. What counts is anonymous memory, as resident in ``/proc/self/status``: pages of mapped files (libraries, the
tokenised rows) are left out, because the kernel can drop them at any time, because a forked process maps them anew, and
because the limit leaves them out too: ``RLIMIT_DATA``, which since Linux 4.7 counts private writable mappings.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Mapping
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
# Writing it to clear_refs sets the high-water mark back to what is resident (proc(5)).
_RESET_HIGH_WATER = "5"
_WARM_SIDE = 256


class HostMemory:
    """Measures this process from its baseline, which is taken when this is made: after the imports."""

    def __init__(self) -> None:
        _reset_high_water()
        self._baseline = _status_bytes()["RssAnon"]
        self._peak = self._baseline
        self._limit_bytes: int | None = None
        self._rlimit: int | None = None

    def lap(self) -> int:
        """Take in the high-water mark since the last lap, and return it, in bytes above the baseline.

        The kernel keeps it for anonymous and file pages together. The file pages of now are taken off, which is exact
        for a lap in which no file was read for the first time, such as every training step but the first.
        """
        status = _status_bytes()
        held_bytes = status["VmHWM"] - status["RssFile"] - status["RssShmem"]
        self._peak = max(self._peak, held_bytes)
        _reset_high_water()
        if self._limit_bytes is not None:
            self._enforce(self._limit_bytes, status)
        return held_bytes - self._baseline

    @property
    def peak_bytes(self) -> int:
        """Their high-water."""
        self.lap()
        return self._peak - self._baseline

    @property
    def headroom_bytes(self) -> int | None:
        """What the enforced limit leaves to allocate, now, or None when there is none."""
        return None if self._rlimit is None else self._rlimit - _status_bytes()["VmData"]

    def limit(self, limit_bytes: int) -> None:
        """Let allocations fail that would hold more than ``limit_bytes`` above the baseline."""
        # The stacks of the threads that compute are no part of what the training needs, so they come first.
        side = torch.ones(_WARM_SIDE, _WARM_SIDE)
        (side @ side).exp()
        self._limit_bytes = limit_bytes
        self._enforce(limit_bytes, _status_bytes())

    def _enforce(self, limit_bytes: int, status: Mapping[str, int]) -> None:
        """Set the kernel's limit to what is mapped now and what may still become resident.

        The kernel counts what is mapped, touched or not, and libraries map much that they never touch: oneDNN 256 KiB
        of code for each primitive, and new primitives for each new length of a row. What is mapped and not resident at
        the end of a lap is taken for such.
        """
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        rlimit = status["VmData"] + max(0, limit_bytes - (status["RssAnon"] - self._baseline))
        self._rlimit = rlimit if hard == resource.RLIM_INFINITY else min(rlimit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (self._rlimit, hard))

    def lift_limit(self) -> None:
        """Let allocations succeed again, so that what happened can be told."""
        self._limit_bytes = None
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _reset_high_water() -> None:
    with contextlib.suppress(OSError):  # without it the mark is that of all laps
        _CLEAR_REFS.write_text(_RESET_HIGH_WATER)


def _status_bytes() -> dict[str, int]:
    lines = (line.partition(":") for line in _STATUS.read_text(encoding="ascii").splitlines())
    return {name: int(value.split()[0]) * 1024 for name, _, value in lines if value.endswith("kB")}
