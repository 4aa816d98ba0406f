"""Temporary folders for jobs and rows; those of processes that were killed are removed by the next one."""

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

# With the machine's name: a lock on a file system that several machines share may hold on one of them alone.
_PREFIX = f"autotune-scratch-{platform.node()}-"
_LOCK = "in-use"


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new temporary folder, which is removed when it is closed, or after this process was killed."""
    _remove_left()
    # A job that is being killed may still write.
    folder = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
    part, lock = Path(folder.name, f"{_LOCK}.part"), Path(folder.name, _LOCK)
    file = os.open(part, os.O_RDWR | os.O_CREAT, 0o600)
    weakref.finalize(folder, os.close, file)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX)
        # Held before another process finds it.
        part.rename(lock)
    return folder


def is_temporary(folder: Path) -> bool:
    """Return whether a folder is in one that is removed when the process that made it ends."""
    system = Path(tempfile.gettempdir())
    return any(each.parent == system and each.name.startswith(_PREFIX) for each in folder.parents)


def _remove_left() -> None:
    """Remove the folders whose processes have ended without removing them, and so released their locks."""
    for lock in Path(tempfile.gettempdir()).glob(f"{glob.escape(_PREFIX)}*/{_LOCK}"):
        with suppress(OSError), lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
