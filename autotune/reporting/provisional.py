"""The provisional ranking below a bar: a few candidates, each on one line, so that redrawing it moves nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from autotune.core.events import Ranked
from autotune.reporting.words import BASELINE_NAME, MISSING, bytes_or_dash, differences

_TITLE = "Best of what is traced so far (provisional)"
_WIDTHS = (10, 10, 9)


def provisional(ranked: Ranked) -> Iterator[Text]:
    """Yield the lines of a provisional ranking; what is too long for its line ends in an ellipsis."""
    yield _line(_TITLE, "bold")
    yield _line(_row("needs", "to spare", "tok/s", f"what differs from {BASELINE_NAME}"), "bold")
    for estimate in ranked.best:
        memory, rate = estimate.memory, estimate.tokens_per_second
        needs = bytes_or_dash(memory.device_bytes if memory is not None else None)
        figures = needs, bytes_or_dash(estimate.spare_bytes), MISSING if rate is None else f"{rate:,.0f}"
        choices = differences(estimate.candidate, ranked.baseline)
        yield _line(_row(*figures, choices), "" if estimate.fits else "red")


def _row(*cells: str) -> str:
    *figures, choices = cells
    return "".join(f"{cell:>{width}}  " for cell, width in zip(figures, _WIDTHS, strict=True)) + choices


def _line(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
