"""``autotune check`` in a terminal: the verdict in one line, then what it stands on, then what was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.syntax import Syntax
from rich.text import Text

from autotune.core.verdict import Finding, Fixed, Need, Outcome, Remedy, Severity, Source, Verdict
from autotune.reporting.copied import copied, show
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
_INDENT = "  "
_COLOURS: Mapping[Severity, str] = {Severity.ERROR: "red", Severity.SILENT: "yellow", Severity.NOTE: ""}


def show_verdict(verdict: Verdict, console: Console, name: str = "") -> None:
    """Print a verdict, under the name of its file if there are several."""
    if name:
        console.print(Text(printable(name), style="bold underline"), soft_wrap=True)
    for part in drawn_verdict(verdict):
        show(part, console)
    if name:
        console.print()


def drawn_verdict(verdict: Verdict) -> Iterator[RenderableType]:
    """Return the parts of a verdict, top to bottom."""
    yield Text(printable(verdict.headline), style=_STYLES[verdict.outcome])
    yield from (Hanging(Text(printable(line))) for line in _evidence(verdict))
    if verdict.need is not None and verdict.need.memory is not None:
        yield from _parts(verdict.need)
    for severity, title in _TITLES.items():
        found = [item for item in verdict.findings if item.severity is severity]
        if found:
            yield Text(f"\n{title}", style="bold")
            yield from _list(found, _COLOURS[severity])
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


def _parts(need: Need) -> Iterator[RenderableType]:
    assert need.memory is not None
    parts = sorted(need.memory.breakdown.items(), key=lambda item: -item[1])
    sizes = [format_bytes(size) for _, size in parts]
    width = max(map(len, sizes), default=0)
    yield from (Hanging(Text(f"{size:>{width}}  {name}")) for size, (name, _) in zip(sizes, parts, strict=True))


def _list(found: list[Finding], style: str) -> Iterator[RenderableType]:
    yield from (Hanging(Text(f"{_place(item)}{printable(item.message)}", style=style)) for item in found)


def _place(item: Finding) -> str:
    return f"{printable(item.file)}:{item.line}: " if item.line is not None else ""


def _remedy(remedy: Remedy, budget_bytes: int) -> Iterator[RenderableType]:
    slower = "; no speed is predicted"
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
        yield from (Hanging(Text(f"{key}: {value}")) for key, value in remedy.keys.items())


def show_fixed(fixed: Fixed, console: Console) -> None:
    """Print what was rewritten in a file, and what is left to do by hand."""
    if fixed.diff:
        show(_diff(fixed.diff), console)
        console.print(Text(f"wrote {printable(fixed.file)}", style="bold"), soft_wrap=True)
    else:
        console.print(Text("No key can be rewritten; the file stays as it is."))
    if fixed.left:
        console.print(Text("\nTo be done by hand", style="bold"))
        for part in _list(list(fixed.left), "yellow"):
            console.print(part)


@dataclass(frozen=True)
class Hanging:
    """A paragraph that is indented, its further lines more than its first, with no spaces behind it."""

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines, none of them longer than the console is wide."""
        further = 2 * _INDENT
        for number, line in enumerate(self.text.wrap(console, max(1, options.max_width - len(further)))):
            line.rstrip()
            yield Text.assemble(_INDENT if number == 0 else further, line)


def _diff(diff: str) -> Text:
    """Return a diff whose lines are whole: one that is cut at the edge of the terminal cannot be taken over."""
    shown = Syntax("", "diff", theme="ansi_light", background_color="default").highlight(printable(diff).rstrip("\n"))
    shown.rstrip()
    return copied("\n").join(Text.assemble(_INDENT, line) for line in shown.split("\n"))
