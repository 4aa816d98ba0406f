"""A heading with indented sentences below it."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def listing(title: str, lines: Iterable[str]) -> RenderableType:
    """Return a heading with indented lines, or nothing where there are no lines and the heading is no sentence."""
    listed = list(lines)
    if not listed and not title.endswith("."):
        return Group()
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=1)
    grid.add_column(overflow="fold")
    for line in listed:
        grid.add_row("", Text(line))
    heading = title if title.endswith(".") else f"{title}:"
    return Group(Text(), Text(heading, style="bold"), *([grid] if listed else []))
