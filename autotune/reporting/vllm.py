"""How a training and vLLM share a GPU, in a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autotune.core.estimate import Plan
from autotune.reporting.listing import listing
from autotune.reporting.shares import ASSUMED, COLUMNS, TITLE, shares


def drawn_vllm(plan: Plan) -> Iterable[RenderableType]:
    """Return the parts of the outlook of a plan; nothing if it has none."""
    found = shares(plan)
    if found is None:
        return
    yield Text()
    yield Text(TITLE, style="bold")
    for sentence in found.answer:
        yield Padding(Text(sentence), (0, 0, 0, 2), expand=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(*(Text(cell.text, style="red" if cell.short else "") for cell in row))
    yield Padding(table, (0, 0, 0, 2), expand=False)
    yield listing(ASSUMED, found.assumptions)
