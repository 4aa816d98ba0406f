"""Text to copy from a terminal, such as commands: its lines stay whole, whatever the width."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.text import Text


def copied(*parts: str | Text | tuple[str, str]) -> Text:
    """Return text whose lines :func:`show` leaves whole; the parts are those of ``Text.assemble``."""
    return Text.assemble(*parts, no_wrap=True)


def show(part: RenderableType, console: Console) -> None:
    """Print a part; what is not to be wrapped is left to the terminal, which keeps its lines when they are copied."""
    console.print(part, soft_wrap=isinstance(part, Text) and bool(part.no_wrap))
