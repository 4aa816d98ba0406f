"""``autotune lengths`` in a terminal: the histogram, the quantiles, and the tokens that each maximum length keeps."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.core.length_report import LengthReport
from autotune.report.words import bar, said_share

_FIGURES_WIDTH = 52
_WIDEST_BAR = 60


def show_lengths(report: LengthReport, console: Console) -> None:
    """Print a report."""
    for part in drawn_lengths(report, console.width):
        console.print(part)


def drawn_lengths(report: LengthReport, width: int) -> Iterable[RenderableType]:
    """Return the parts of a report for a console of ``width`` characters, top to bottom."""
    workload = report.workload
    dataset, model = (workload.dataset.name, "bold"), (workload.model.name, "bold")
    yield Text.assemble(dataset, f" ({workload.dataset.format}), tokenised for ", model)
    yield Text(f"{report.rows:,} rows, {report.tokens:,} tokens, {report.mean:,.0f} in a row on average")
    yield Text()
    yield _histogram_table(report, min(_WIDEST_BAR, max(10, width - _FIGURES_WIDTH)))
    yield Text()
    yield _quantiles_table(report)
    yield Text()
    yield _limits_table(report)


def _histogram_table(report: LengthReport, bar_width: int) -> Table:
    table = _table("tokens in a row", "rows", "share of tokens")
    table.add_column("", width=bar_width, no_wrap=True, style="cyan")
    most = max(bin_.rows for bin_ in report.histogram)
    for bin_ in report.histogram:
        span = f"{bin_.low:,}" if bin_.low == bin_.high else f"{bin_.low:,} to {bin_.high:,}"
        share = said_share(bin_.tokens / report.tokens) if report.tokens else "-"
        table.add_row(span, f"{bin_.rows:,}", share, bar(bin_.rows / most, bar_width))
    return table


def _quantiles_table(report: LengthReport) -> Table:
    table = _table("share of rows", "at most")
    for quantile in report.quantiles:
        table.add_row(_said_quantile(quantile.share), f"{quantile.tokens:,} tokens")
    return table


def _said_quantile(share: float) -> str:
    named = {0.0: "shortest", 0.5: "median", 1.0: "longest"}
    return named.get(share, f"{100 * share:.0f} %")


def _limits_table(report: LengthReport) -> Table:
    drops = any(limit.rows_dropped for limit in report.limits)
    titles = ("max_length", "tokens kept", "tokens dropped", "rows cut", "share of rows")
    table = _table(*titles, *(("rows dropped",) if drops else ()))
    for limit in report.limits:
        table.add_row(
            f"{limit.max_length:,}",
            said_share(limit.coverage),
            f"{limit.tokens_dropped:,}",
            f"{limit.rows_cut:,}",
            said_share(limit.rows_cut / report.rows),
            *((f"{limit.rows_dropped:,}",) if drops else ()),
        )
    return table


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table
