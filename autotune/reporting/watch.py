"""Chooses the progress output: live in a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from autotune.core.events import Listener
from autotune.reporting.live import LiveListener
from autotune.reporting.plain import PlainListener
from autotune.reporting.unflushed import unflushed


@contextmanager
def watching(console: Console) -> Iterator[Listener]:
    """Yield a listener that shows the progress of a run on ``console`` during the context."""
    if console.is_terminal and not console.is_dumb_terminal:
        with unflushed(console.file), LiveListener(console) as listener:
            yield listener
    else:
        yield PlainListener(lambda line: console.print(line, markup=False, soft_wrap=True))
