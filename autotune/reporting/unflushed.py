"""Keeps what a terminal has not shown yet when Ctrl-C is pressed."""

from __future__ import annotations

import os
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

_LOCAL_MODES = 3
"""Place of the local modes in what ``termios.tcgetattr`` returns."""


@contextmanager
def unflushed(file: IO[str]) -> Iterator[None]:
    """Let the terminal show all that it was sent, whenever Ctrl-C is pressed during the context.

    A terminal throws away what it has not shown yet (termios(3), NOFLSH). Of a display that moves the cursor back to
    redraw itself, lines would be missing, and the next frame would erase lines above it. Nothing happens where ``file``
    is no terminal.
    """
    before = _no_flush(file, on=True)
    try:
        yield
    finally:
        if before is False:
            _no_flush(file, on=False)


def _no_flush(file: IO[str], *, on: bool) -> bool | None:
    """Set the mode and return what it was; None if it cannot be set."""
    with suppress(OSError, ValueError, termios.error):
        terminal = file.fileno()
        # A process in the background would be stopped.
        if os.tcgetpgrp(terminal) == os.getpgrp():
            attributes = termios.tcgetattr(terminal)
            before = bool(attributes[_LOCAL_MODES] & termios.NOFLSH)
            attributes[_LOCAL_MODES] &= ~termios.NOFLSH
            attributes[_LOCAL_MODES] |= termios.NOFLSH if on else 0
            termios.tcsetattr(terminal, termios.TCSANOW, attributes)
            return before
    return None
