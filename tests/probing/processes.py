"""Helpers for processes: which ones exist, waiting for a condition, and servers that start quickly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from autotune.probing.channel import Channel
from autotune.probing.server import START_SECONDS
from tests.probing.without_libraries import MODULE as WITHOUT_LIBRARIES


def running(pids: Iterable[int]) -> list[int]:
    """Return those of the processes that run; one that ended and was not waited for does not."""
    return [pid for pid in pids if psutil.pid_exists(pid) and _state(pid) != psutil.STATUS_ZOMBIE]


def wait_until(holds: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Wait until something holds, and return whether it came to that; on a machine that is busy it takes its time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return holds()
        time.sleep(0.02)
    return True


def stop(pid: int) -> None:
    """Stop a process of this one, and wait until it has stopped."""
    psutil.Process(pid).suspend()
    assert wait_until(lambda: _state(pid) == psutil.STATUS_STOPPED)


@contextmanager
def timed_from(*files: Path) -> Iterator[None]:
    """Let time limits of jobs begin once jobs have written files: as far as that they come on any machine."""
    receive = Channel.receive

    def received(channel: Channel, timeout_seconds: float | None = None) -> object:
        if timeout_seconds not in (None, START_SECONDS):
            assert wait_until(lambda: all(file.exists() and file.stat().st_size for file in files))
        return receive(channel, timeout_seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "receive", received)
        yield


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
