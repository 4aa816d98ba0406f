"""The summary at the end of a run of ``autotune probe``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autotune.core.result import Choosable, Result
from autotune.core.status import RunStatus
from autotune.reporting.comparison import (
    Row,
    comparison,
    costs,
    costs_title,
    headline,
    said_confirmed,
    said_contribution,
    said_runs,
    said_steps,
)
from autotune.reporting.copied import copied, show
from autotune.reporting.listing import listing
from autotune.reporting.outlook import (
    next_command,
    said_interrupted,
    said_left_out,
    said_trials,
    said_unlockable,
    said_vetoes,
    said_ways_out,
)
from autotune.reporting.phases import PhaseRow, phase_rows
from autotune.reporting.picture import BASELINE, OTHER, RECOMMENDED, points, scatter
from autotune.reporting.unfit import said_nothing_fits
from autotune.reporting.words import MISSING, bar, baseline_name, printable, said, said_bytes, said_path
from autotune.units import format_seconds

_PICTURE_WIDTH = 100
_NARROW = 100


def show_summary(result: Result, console: Console, trl: str = "trl") -> None:
    """Print a result; ``trl`` is the command that starts TRL on this machine."""
    for part in summary(result, console.width, trl):
        show(part, console)


def summary(result: Result, width: int, trl: str = "trl") -> Iterable[RenderableType]:
    """Return the parts of the summary for a console of ``width`` characters, top to bottom."""
    yield Text()
    if result.recommended is not None:
        yield from _found(result, result.recommended, width)
    elif result.status is RunStatus.INTERRUPTED:
        yield Text(said_interrupted(result), style="bold yellow")
    else:
        yield Text(said_nothing_fits(result), style="bold red")
        yield listing("What might change this (not measured)", said_ways_out(result))
    yield _picture(result, width)
    yield listing(said_trials(result), said_vetoes(result))
    yield listing("Not searched", said_left_out(result.left_out))
    if result.recommended is not None:
        yield listing("Not measured, since it changes training", said_unlockable(result.unlockable))
    yield listing("Notes", [note for note in (said_steps(result), *result.notes) if note])
    yield from _ending(result, trl)


def _found(result: Result, recommended: Choosable, width: int) -> Iterable[RenderableType]:
    yield Text(headline(result, recommended), style="bold green")
    if result.baseline is not None and recommended.candidate != result.baseline.candidate:
        yield Padding(
            Text(said(recommended.candidate, result.baseline.candidate), style="bold"), (0, 0, 0, 2), expand=False
        )
    done = result.confirmed and result.status is not RunStatus.INTERRUPTED
    yield Text(said_confirmed(result), style="green" if done else "yellow")
    yield Text(said_runs(result, recommended))
    yield Text()
    yield _comparison_table(
        comparison(result, recommended), 8 if width < _NARROW else 20, baseline_name(own=result.base is not None)
    )
    phases = phase_rows(recommended)
    if phases:
        yield Text()
        yield _phases_table(phases, 6 if width < _NARROW else 16)
    if result.contributions:
        yield Text()
        yield _contributions_table(result)
    found = costs(result)
    if found and result.base is not None:
        yield listing(costs_title(result.base.file), [f"`{cost.written}` {cost.said}" for cost in found])
    if result.base is not None and result.base.diff:
        yield Text()
        yield _diff(result.base.diff)


def _diff(diff: str) -> Text:
    styles = {"+": "green", "-": "red", "@": "cyan"}
    lines = printable(diff).splitlines()
    return Text("\n").join(Text(line, style=styles.get(line[:1], ""), overflow="fold") for line in lines)


def _phases_table(rows: Iterable[PhaseRow], bar_width: int) -> Table:
    table = Table(box=box.HORIZONTALS, show_edge=False, pad_edge=False)
    for title, side in (
        ("phase", "left"),
        ("peak memory", "right"),
        ("", "left"),
        ("in a step", "right"),
        ("", "left"),
    ):
        table.add_column(title, justify="left" if side == "left" else "right")
    for row in rows:
        bars = ["" if share is None else bar(share, bar_width) for share in (row.peak_share, row.time_share)]
        seconds = format_seconds(row.seconds) if row.seconds is not None else MISSING
        table.add_row(row.name, said_bytes(row.peak_bytes), bars[0], seconds, bars[1])
    return table


def _comparison_table(rows: Iterable[Row], bar_width: int, baseline: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    table.add_column("recommended", justify="right", style="bold")
    table.add_column("", width=bar_width, no_wrap=True, style="green")
    table.add_column(baseline, justify="right")
    table.add_column("", width=bar_width, no_wrap=True, style="cyan")
    for row in rows:
        bars = ["" if share is None else bar(share, bar_width) for share in (row.recommended_share, row.baseline_share)]
        table.add_row(row.label, row.recommended, bars[0], row.baseline, bars[1])
    return table


def _contributions_table(result: Result) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("what it chose", "changed back to", "measured"):
        table.add_column(title, overflow="fold")
    for contribution in result.contributions:
        table.add_row(
            Text(f"{contribution.knob}={contribution.choice}"),
            Text(str(contribution.instead_of)),
            Text(said_contribution(contribution)),
        )
    return table


def _picture(result: Result, width: int) -> RenderableType:
    drawn = points(result)
    if len(drawn) < 2:
        return Group()
    lines = scatter(drawn, result.budget_bytes, min(width - 2, _PICTURE_WIDTH))
    names = {
        RECOMMENDED: "recommended",
        BASELINE: baseline_name(own=result.base is not None),
        OTHER: "other candidates",
    }
    marks = {point.mark for point in drawn}
    legend = "   ".join(f"{mark} {name}" for mark, name in names.items() if mark in marks)
    picture = Text("\n".join([*lines, legend]), no_wrap=True)
    picture.highlight_words([RECOMMENDED], "bold green")
    picture.highlight_words([BASELINE], "bold cyan")
    return Padding(picture, (1, 0, 0, 0), expand=False)


def _ending(result: Result, trl: str) -> Iterable[RenderableType]:
    if not result.output_directory:
        return
    yield Text()
    yield copied(f"The bundle is in {said_path(Path(result.output_directory))}")
    if result.recommended is not None:
        yield copied("Train with:  ", (next_command(result, trl), "bold"))
