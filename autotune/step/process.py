"""What Linux offers to keep a process from outliving its parent, and a group from outliving its leader."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

# PR_SET_PDEATHSIG of linux/prctl.h.
_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; end at once when that has already happened.

    Args:
        parent: the process id of the parent as it knows itself.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_group(leader: int) -> None:
    """Kill a process that is not yet reaped, and every process of the group that it leads."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)
