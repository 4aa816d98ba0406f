"""Temporary folders for jobs and rows."""

from __future__ import annotations

import tempfile
from pathlib import Path

_PREFIX = "autotune-"


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new temporary folder, which is removed when it is closed."""
    # A job that is being killed may still write.
    return tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)


def is_temporary(folder: Path) -> bool:
    """Return whether a folder is in one that is removed when the process that made it ends."""
    system = Path(tempfile.gettempdir())
    return any(each.parent == system and each.name.startswith(_PREFIX) for each in folder.parents)
