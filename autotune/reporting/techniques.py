"""``autotune techniques`` in a terminal: every knob with its choices, and what this machine does not support."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.core.catalogue import CatalogueOption, CatalogueRow

_CHANGES = "changes-training"


def show_techniques(rows: Iterable[CatalogueRow], console: Console) -> None:
    """Print the catalogue."""
    for row in rows:
        console.print(drawn_technique(row))


def drawn_technique(row: CatalogueRow) -> RenderableType:
    """Return one knob with its choices."""
    title = Text.assemble((row.knob, "bold cyan"), f"  {row.summary}")
    facts = [f"default: {row.default}"]
    if row.needs:
        facts.append(f"needs: {row.needs}")
    if row.changes:
        facts.append(f"--allow {row.knob}: {row.changes}")
    if not row.in_default_space:
        facts.append("not in the default search space")
    body = Table.grid()
    body.add_column(width=2)
    body.add_column(overflow="fold")
    for fact in facts:
        body.add_row("", Text(fact, style="dim"))
    body.add_row("", _choices(row))
    return Group(title, body, Text())


def _choices(row: CatalogueRow) -> Table:
    choices = Table.grid(padding=(0, 2))
    choices.add_column(no_wrap=True)
    choices.add_column(overflow="fold")
    for option in row.options:
        choices.add_row(Text(str(option.choice), style="bold" if option.available else "dim"), _said_option(option))
    return choices


def _said_option(option: CatalogueOption) -> Text:
    text = Text(option.summary)
    if option.effect == _CHANGES:
        text.append(" (changes training)", style="yellow")
    if not option.available:
        text.append(f" (not here: {option.reason})", style="red")
    return text
