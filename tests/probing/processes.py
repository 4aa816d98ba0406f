"""Which processes are there, and servers that start quickly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.probing.without_libraries import MODULE as WITHOUT_LIBRARIES


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


@contextmanager
def quick_servers() -> Iterator[None]:
    """Let servers that are started in this context import no libraries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autotune.probing.channel._SERVER", WITHOUT_LIBRARIES)
        yield


def _state(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_ZOMBIE)
