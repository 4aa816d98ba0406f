"""Temporary folders for jobs and rows; a new process removes those of processes that were killed."""

from __future__ import annotations

import fcntl
import glob
import os
import platform
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

# With the machine's name: on a shared file system, a lock may not be visible to other machines.
_PREFIX = f"autotune-scratch-{platform.node()}-"
_LOCK = "in-use"


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new temporary folder, removed when it is closed, or by a later process if this one is killed."""
    _remove_abandoned()
    # A job that is being killed may still write.
    folder = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
    part, lock = Path(folder.name, f"{_LOCK}.part"), Path(folder.name, _LOCK)
    file = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
    weakref.finalize(folder, os.close, file)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX)
        # Locked before another process can find it.
        part.rename(lock)
    return folder


def is_temporary(path: Path) -> bool:
    """Return whether a file or folder is inside one of :func:`scratch_folder`."""
    system = Path(tempfile.gettempdir())
    places = system, system.resolve()
    return any(each.parent in places and each.name.startswith(_PREFIX) for each in path.parents)


def _remove_abandoned() -> None:
    """Remove the folders whose locks are released, since their processes were killed."""
    for lock in Path(tempfile.gettempdir()).glob(f"{glob.escape(_PREFIX)}*/{_LOCK}"):
        with suppress(OSError), lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
