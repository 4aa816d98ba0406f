"""Which processes are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psutil


def running(pids: Iterable[int]) -> list[int]:
    """Return those of the processes that run; one that ended and was not waited for does not."""
    return [pid for pid in pids if psutil.pid_exists(pid) and _state(pid) != psutil.STATUS_ZOMBIE]


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Wait until something holds, and return whether it came to that."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _state(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_ZOMBIE)
