"""Temporary folders for jobs and rows, also removed when their process was killed: by the next one that makes some."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "autotune-"
_OWNED = ".autotune-scratch"


class ScratchFolder:
    """A temporary folder that is removed when it is closed.

    Its process holds a lock on a file in it, which the kernel releases however the process ends. Folders of this user
    whose lock is free are removed when a new one is made.

    Attributes:
        path: the folder.
    """

    def __init__(self) -> None:
        _remove_left_folders()
        # A job that is being killed may still write; what it leaves is removed by the next process.
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        self._lock = _owned(self.path)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the folder with all that is in it."""
        self._folder.cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def is_temporary(folder: Path) -> bool:
    """Return whether a folder is in one that is removed when the process that made it ends."""
    system = Path(tempfile.gettempdir())
    return any(each.parent == system and each.name.startswith(_PREFIX) for each in folder.parents)


def _owned(folder: Path) -> int | None:
    """Return the descriptor that holds the folder's lock, or None on a file system without locks."""
    part = folder / f"{_OWNED}.part"
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    # Locked before it has the name by which others look for it.
    part.rename(folder / _OWNED)
    return descriptor


def _remove_left_folders() -> None:
    for file in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNED}"):
        try:
            if file.parent.is_symlink() or file.parent.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(file.parent, ignore_errors=True)
        except OSError:
            continue
        finally:
            os.close(descriptor)
