"""Which way a run is followed: live in a terminal, in plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from autotune.core.events import Listener
from autotune.report.live import LiveListener
from autotune.report.plain import PlainListener


@contextmanager
def watching(console: Console) -> Iterator[Listener]:
    """Give a listener that shows on ``console`` what a run does, for as long as the context lasts."""
    if console.is_terminal and not console.is_dumb_terminal:
        with LiveListener(console) as listener:
            yield listener
    else:
        yield PlainListener(lambda line: console.print(line, markup=False, soft_wrap=True))
