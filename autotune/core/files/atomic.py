"""Writes files and directories atomically, and finds the user's cache."""

from __future__ import annotations

import errno
import glob
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autotune.errors import InputError

# A partial file or directory that has not changed for this long is no longer being written.
_ABANDONED_SECONDS = 86_400.0


def cache_directory() -> Path:
    """Return autotune's directory within the user's cache directory (XDG Base Directory Specification).

    Raises:
        InputError: there is none: no HOME, and no entry of this user in /etc/passwd.
    """
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification demands that relative paths be ignored.
    if configured.is_absolute():
        return configured / "autotune"
    try:
        return Path.home() / ".cache" / "autotune"
    except RuntimeError as error:
        raise InputError("There is no home directory.", hint="Set XDG_CACHE_HOME to a directory.") from error


def reason_of(error: OSError) -> str:
    """Return why a path cannot be used, for messages that name the path."""
    # Of making a directory, whose name a file or a broken link has.
    return "it is not a directory" if error.errno == errno.EEXIST else error.strerror or str(error)


def unwritten(path: Path, error: OSError, advice: str) -> InputError:
    """Return the error to show for a path that cannot be written.

    Args:
        advice: what helps on any disk, such as ``choose another directory``.
    """
    hint = f"free some space, or {advice}" if error.errno in (errno.ENOSPC, errno.EDQUOT) else advice
    return InputError(f"{path} cannot be written: {reason_of(error)}.", hint=f"{hint[:1].upper()}{hint[1:]}.")


@contextmanager
def written_atomically(target: Path) -> Iterator[Path]:
    """Yield a path next to ``target`` to write a file or a directory to, and rename it to ``target`` on success.

    The directory of ``target`` must exist. An earlier ``target`` stays until the new one is complete. Each call yields
    its own path, so several processes, also on machines that share the folder, may write one target at the same time:
    the last rename wins.

    Raises:
        OSError: the disk is full, or the directory cannot be written.
    """
    part = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        yield part
        if part.is_dir():
            remove_partial_files(target)
            _remove(target)  # a directory with files in it cannot be renamed over
        part.replace(target)
    finally:
        _remove(part)


def remove_partial_files(target: Path) -> None:
    """Remove partial files of processes that were killed while they wrote ``target``.

    This lists the whole directory, which is too slow for each document of a cache.
    """
    for part in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > _ABANDONED_SECONDS:
                _remove(part)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
