"""The provisional ranking below a bar: a few candidates, each on one line, so that redrawing it moves nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from autotune.core.events import Ranked
from autotune.reporting.words import BASELINE_NAME, differences, memory_cells, number_or_dash

_TITLE = "Best of what is traced so far (provisional)"
_WIDTHS = (10, 10, 9)


def provisional(ranked: Ranked) -> Iterator[Text]:
    """Yield the lines of a provisional ranking; what is too long for its line ends in an ellipsis."""
    yield _line(_TITLE, "bold")
    yield _line(_row("needs", "to spare", "tok/s", f"what differs from {BASELINE_NAME}"), "bold")
    for estimate in ranked.best:
        needs, spare, _ = memory_cells(estimate)
        choices = differences(estimate.candidate, ranked.baseline)
        row = _row(needs, spare, number_or_dash(estimate.tokens_per_second), choices)
        yield _line(row, "" if estimate.fits else "red")


def _row(*cells: str) -> str:
    *figures, choices = cells
    return "".join(f"{cell:>{width}}  " for cell, width in zip(figures, _WIDTHS, strict=True)) + choices


def _line(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
