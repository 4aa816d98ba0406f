"""Linux process control: ends a process with its parent, and a process group with its leader."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

# PR_SET_PDEATHSIG of linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends; exit at once if it has already ended.

    Args:
        parent: the process id of the parent, in the parent's own view.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_group(leader: int) -> None:
    """Kill a process that is not yet reaped, and every process in its process group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)
