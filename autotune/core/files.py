"""Writes files and directories atomically, and finds the user's cache."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autotune.errors import InputError

# A file or directory that is still being written has changed within this time.
_LEFT_SECONDS = 86_400.0


def cache_directory() -> Path:
    """Return autotune's directory within the user's cache directory (XDG Base Directory Specification).

    Raises:
        InputError: there is none: no HOME, and no entry of this user in /etc/passwd.
    """
    asked = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification says that relative paths are to be ignored.
    if asked.is_absolute():
        return asked / "autotune"
    try:
        return Path.home() / ".cache" / "autotune"
    except RuntimeError as error:
        raise InputError("There is no home directory.", hint="Set XDG_CACHE_HOME to a directory.") from error


@contextmanager
def written_atomically(target: Path) -> Iterator[Path]:
    """Yield a path next to ``target`` to write a file or a directory to, and rename it to ``target`` on success.

    The directory of ``target`` has to exist. An earlier ``target`` stays until the new one is complete. Each call has a
    path of its own, so that several processes, on one machine or on several that share the folder, may write the same
    target at a time: the last one stays.

    Raises:
        OSError: the disk is full, or the directory cannot be written.
    """
    part = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        yield part
        if part.is_dir():
            remove_left(target)
            _remove(target)  # a directory with files in it cannot be renamed over
        part.replace(target)
    finally:
        _remove(part)


def remove_left(target: Path) -> None:
    """Remove partial files of processes that were killed while they wrote ``target``.

    This lists the whole directory, which is too slow for each document of a cache.
    """
    for part in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > _LEFT_SECONDS:
                _remove(part)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
