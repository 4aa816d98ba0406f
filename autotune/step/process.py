"""Linux process control: fork, parent-death signal, process groups, and a count of suspensions."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable

# PR_SET_PDEATHSIG of linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends; exit at once if it has already ended.

    Args:
        parent: the process id of the parent, in the parent's own view.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def fork_process(run: Callable[[], int]) -> int:
    """Fork a process that runs a function, exits with its result, and ends with this process; return its id."""
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent(parent)
        status = run()
    except BaseException:  # noqa: BLE001 the forked process must not return into its parent's loop
        traceback.print_exc()
    finally:
        os._exit(status)


def count_suspensions() -> Callable[[], int]:
    """Start counting suspensions of this process (SIGCONT); return a function that returns the count.

    A scheduler that suspends a job, such as Slurm's gang scheduling, stops each of its processes.
    """
    count = 0

    def increment(*_: object) -> None:
        nonlocal count
        count += 1

    signal.signal(signal.SIGCONT, increment)
    return lambda: count


def kill_group(leader: int) -> None:
    """Kill a process that is not yet reaped, and every process in its process group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)
