"""``autotune check`` in a terminal: the verdict in one line, then what it stands on, then what was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from autotune.core.verdict import Finding, Fixed, Need, Outcome, Remedy, Severity, Source, Verdict
from autotune.reporting.words import printable
from autotune.units import format_bytes, format_rate, format_share

_STYLES: Mapping[Outcome, str] = {
    Outcome.FITS: "bold green",
    Outcome.READ: "bold green",
    Outcome.TOO_CLOSE: "bold yellow",
    Outcome.UNKNOWN: "bold yellow",
    Outcome.DOES_NOT_FIT: "bold red",
    Outcome.CANNOT_RUN: "bold red",
}
_TITLES: Mapping[Severity, str] = {
    Severity.ERROR: "Wrong",
    Severity.SILENT: "Done without saying so",
    Severity.NOTE: "Notes",
}
_COLOURS: Mapping[Severity, str] = {Severity.ERROR: "red", Severity.SILENT: "yellow", Severity.NOTE: ""}


def show_verdict(verdict: Verdict, console: Console, name: str = "") -> None:
    """Print a verdict, under the name of its file if there are several."""
    if name:
        console.print(Text(printable(name), style="bold underline"))
    for part in drawn_verdict(verdict):
        console.print(part)


def drawn_verdict(verdict: Verdict) -> Iterator[RenderableType]:
    """Return the parts of a verdict, top to bottom."""
    yield Text(printable(verdict.headline), style=_STYLES[verdict.outcome])
    yield from (Padding(Text(printable(line)), (0, 0, 0, 2)) for line in _evidence(verdict))
    if verdict.need is not None and verdict.need.memory is not None:
        yield Padding(_parts(verdict.need), (0, 0, 0, 2))
    for severity, title in _TITLES.items():
        found = [item for item in verdict.findings if item.severity is severity]
        if found:
            yield Text(f"\n{title}", style="bold")
            yield Padding(_list(found, _COLOURS[severity]), (0, 0, 0, 2))
    if verdict.remedy is not None:
        yield from _remedy(verdict.remedy, verdict.budget_bytes)
    elif verdict.outcome is Outcome.DOES_NOT_FIT:
        yield Text("\nNo change of up to three techniques that trains the same was found to fit.")


def _evidence(verdict: Verdict) -> Iterator[str]:
    what = [f"trainer {verdict.trainer}"] if verdict.trainer else []
    what += [f"model {verdict.model}"] if verdict.model else []
    what += [f"data {verdict.dataset}"] if verdict.dataset else []
    what += [f"on {verdict.device}"] if verdict.device else []
    if what:
        yield ", ".join(what)
    need = verdict.need
    if need is None:
        return
    if need.source is Source.TRACED:
        yield (
            f"TRL's own step, traced without a device: {format_bytes(need.bytes)}, at least"
            f" {format_bytes(need.least_bytes)} and at most {format_bytes(need.most_bytes)} by the stated error"
            f"{_error(need)}"
        )
    elif need.source is Source.PROBED:
        yield f"Run for real on its worst micro-batches{_rate(need)}; the most was held in {need.phase or 'a step'}"
    else:
        yield f"Measured by the study whose bundle this is, on this device and with these versions{_rate(need)}"
    if verdict.outcome is Outcome.TOO_CLOSE and verdict.passes is None:
        yield "--probe runs it for real; --when-unsure pass or fail decides without."
    if verdict.from_cache:
        yield "Nothing has changed since an earlier check, which said this."


def _error(need: Need) -> str:
    return f" of {format_share(need.memory.error)}" if need.memory is not None else ""


def _rate(need: Need) -> str:
    return f", {format_rate(need.tokens_per_second)}" if need.tokens_per_second is not None else ""


def _parts(need: Need) -> RenderableType:
    assert need.memory is not None
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    table.add_column()
    for name, size in sorted(need.memory.breakdown.items(), key=lambda item: -item[1]):
        table.add_row(format_bytes(size), name)
    return table


def _list(found: list[Finding], style: str) -> RenderableType:
    return Group(*(Text(f"{_place(item)}{printable(item.message)}", style=style) for item in found))


def _place(item: Finding) -> str:
    return f"{printable(item.file)}:{item.line}: " if item.line is not None else ""


def _remedy(remedy: Remedy, budget_bytes: int) -> Iterator[RenderableType]:
    slower = ""
    if remedy.slower is not None:
        slower = f", and a step takes {remedy.slower:.2f} times as long"
    yield Text(
        f"\nThe smallest change that fits: {format_bytes(remedy.bytes)}, at most {format_bytes(remedy.most_bytes)} of"
        f" {format_bytes(budget_bytes)}{slower}",
        style="bold",
    )
    if remedy.diff:
        yield _diff(remedy.diff)
    else:
        yield from (Padding(Text(f"{key}: {value}"), (0, 0, 0, 2)) for key, value in remedy.keys.items())


def show_fixed(fixed: Fixed, console: Console) -> None:
    """Print what was rewritten in a file, and what is left to do by hand."""
    if fixed.diff:
        console.print(_diff(fixed.diff))
        console.print(Text(f"wrote {printable(fixed.file)}", style="bold"), soft_wrap=True)
    else:
        console.print(Text("No key can be rewritten; the file stays as it is."))
    if fixed.left:
        console.print(Text("\nTo be done by hand", style="bold"))
        console.print(Padding(_list(list(fixed.left), "yellow"), (0, 0, 0, 2)))


def _diff(diff: str) -> RenderableType:
    return Padding(Syntax(printable(diff), "diff", theme="ansi_light", background_color="default"), (0, 0, 0, 2))
