"""The end of a job's log, as evidence and for messages."""

from __future__ import annotations

import os
from pathlib import Path

from autotune.confidential import hidden
from autotune.core.protocol import LOG_FILE

_READ_BYTES = 16_384
_LINE_CHARACTERS = 300


def last_lines(folder: Path, count: int) -> list[str]:
    """Return up to ``count`` of the last lines of a job's log that are not blank; none when there is no log."""
    try:
        with (folder / LOG_FILE).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _READ_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    lines = [hidden(line.strip()) for line in text.splitlines()]
    return [line[:_LINE_CHARACTERS] for line in lines if line][-count:]
