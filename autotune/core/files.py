"""Writes files and directories atomically."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_beside(target: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yield a path beside ``target`` to write a file or a directory to, and rename it to ``target`` on success.

    The directory of ``target`` has to exist. An earlier ``target`` stays until the new one is complete.

    Args:
        shared: whether several processes may write the same target at a time; each then gets its own path.

    Raises:
        OSError: the disk is full, or the directory cannot be written.
    """
    part = target.with_name(f".{target.name}.{os.getpid()}.part" if shared else f".{target.name}.part")
    _remove_directory(part)  # a process that was killed left it
    try:
        yield part
        if part.is_dir():
            _remove_directory(target)  # a directory with files in it cannot be renamed over
        part.replace(target)
    finally:
        _remove_directory(part)
        part.unlink(missing_ok=True)


def _remove_directory(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
