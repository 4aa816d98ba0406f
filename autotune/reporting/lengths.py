"""``autotune lengths`` in a terminal: the histogram, the quantiles, and the tokens that each maximum length keeps."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.core.length_report import LengthReport
from autotune.reporting.words import bar, said_share

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
    yield Text(said_of_long_rows(report))
    yield _limits_table(report)


def _histogram_table(report: LengthReport, bar_width: int) -> Table:
    single = report.workload.dataset.documents.sequences == 1
    table = _table("tokens in a row" if single else "longest sequence", "rows", "share of tokens")
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
    drops, cuts = _drops(report), _cuts(report)
    dropping = ("rows kept", "rows dropped") if drops else ()
    cutting = ("rows cut", "share of rows") if cuts or not drops else ()
    table = _table("max_length", "tokens kept", "tokens dropped", *dropping, *cutting)
    for limit in report.limits:
        dropped = (said_share(limit.row_coverage), f"{limit.rows_dropped:,}")
        cut = (f"{limit.rows_cut:,}", said_share(limit.rows_cut / report.rows))
        table.add_row(
            f"{limit.max_length:,}",
            said_share(limit.coverage),
            f"{limit.tokens_dropped:,}",
            *(dropped if drops else ()),
            *(cut if cutting else ()),
        )
    return table


def _drops(report: LengthReport) -> bool:
    return any(limit.rows_dropped for limit in report.limits)


def _cuts(report: LengthReport) -> bool:
    return any(limit.rows_cut for limit in report.limits)


def said_of_long_rows(report: LengthReport) -> str:
    """Return what becomes of rows that are longer than the maximum length."""
    if not _drops(report):
        return "Rows that are longer than max_length are cut."
    if not _cuts(report):
        return "Rows that are longer than max_length are dropped whole; none is cut."
    return "Rows that are longer than max_length are cut, or dropped where nothing would be left to train on."


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table
