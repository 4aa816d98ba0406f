"""Chooses the progress output: live in a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from rich.console import Console

from autotune.core.events import Listener
from autotune.reporting.live import live_progress
from autotune.reporting.progress import PlainListener

_LOCAL_MODES = 3
"""Place of the local modes in what ``termios.tcgetattr`` returns."""


@contextmanager
def watching(console: Console) -> Iterator[Listener]:
    """Yield a listener that shows the progress of a run on ``console`` during the context."""
    if console.is_terminal and not console.is_dumb_terminal:
        with unflushed(console.file), live_progress(console) as listener:
            yield listener
    else:
        yield plain_lines(console)


def plain_lines(console: Console) -> Listener:
    """Return a listener that prints each event as a line, however long."""
    return PlainListener(lambda line: console.print(line, markup=False, soft_wrap=True))


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
