"""Shows the progress of a run: a live display in a terminal, above which finished probes stay; else plain lines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from autotune.core import events
from autotune.core.status import ProbeStatus
from autotune.reporting import words
from autotune.reporting.progress import PlainListener, Progress, reason_text, tracing_text
from autotune.units import format_duration

_STYLES = {
    ProbeStatus.OK: "green",
    ProbeStatus.OUT_OF_MEMORY: "yellow",
    ProbeStatus.HOST_OUT_OF_MEMORY: "yellow",
    ProbeStatus.UNSUPPORTED: "dim",
}
_LINE_STYLES: Mapping[type[events.Event], str] = {
    events.StageStarted: "bold", events.WorkloadReady: "", events.StudyResumed: "", events.Noted: "italic",
}  # fmt: skip
"""Events whose lines stay above the display, with their styles."""
# Each redraws all lines, whether they have changed or not: more would flicker in slow terminals.
_FRAMES_PER_SECOND = 4
_MARGIN = 4
_TITLE = "Best candidates traced so far (provisional)"
_WIDTHS = (10, 10, 9)


@contextmanager
def watching(console: Console) -> Iterator[events.Listener]:
    """Yield a listener that shows the progress of a run on ``console`` during the context."""
    if console.is_terminal and not console.is_dumb_terminal:
        with _live(console) as listener:
            yield listener
    else:
        yield plain_lines(console)


def plain_lines(console: Console) -> events.Listener:
    """Return a listener that prints each event as a line, without wrapping."""
    return PlainListener(lambda line: console.print(line, markup=False, soft_wrap=True))


@contextmanager
def _live(console: Console) -> Iterator[events.Listener]:
    """Yield a listener that redraws the display during the context; the lines of finished probes stay."""
    display = Display()
    progress, headed = display.progress, False

    def listener(event: events.Event) -> None:
        """Handle an event, and print the lines that stay."""
        nonlocal headed
        progress.follow(event)
        if type(event) in _LINE_STYLES:
            console.print(Text(progress.line(event), style=_LINE_STYLES[type(event)]))
        if isinstance(event, events.ProbeFinished):
            if not headed:
                console.print(
                    probe_row("#", "status", "memory", "tokens/s", Text(f"differences from {progress.name}"), "bold")
                )
                headed = True
            console.print(finished_row(event, progress))

    with Live(display, console=console, refresh_per_second=_FRAMES_PER_SECOND, transient=True, redirect_stdout=False):
        yield listener


class Display:
    """The part that is redrawn: running probes or traces, progress bars, the best so far, a provisional ranking."""

    def __init__(self) -> None:
        self.progress = Progress()
        self._started = time.monotonic()
        self._spinner = Spinner("dots")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the current state."""
        progress = self.progress
        parts: list[Table | Text] = []
        if progress.tracing is None:
            parts.append(self._running(progress))
        else:
            parts.append(_bar(progress.tracing.done, progress.tracing.expected, tracing_text(progress.tracing)))
        if progress.limit is not None:
            counts = f"{progress.count_text}, {self._elapsed_text()}"
            parts.append(_bar(progress.done, progress.limit, counts))
        if progress.best_text:
            parts.append(Text(progress.best_text, style="bold green", overflow="ellipsis", no_wrap=True))
        if progress.ranked is not None:
            parts += _provisional(progress.ranked)
        # The terminal echoes ^C behind the last line; if that made it wrap, one line would not be erased.
        yield from console.render(Group(*parts), options.update_width(max(1, options.max_width - _MARGIN)))

    def _running(self, progress: Progress) -> Table:
        running = Table.grid(padding=(0, 1))
        running.add_column(min_width=1, no_wrap=True)
        running.add_column(no_wrap=True, overflow="ellipsis")
        # The line of a stage stays above, so that it is not repeated here.
        running.add_row(self._spinner, Text(progress.running_text or self._elapsed_text()))
        return running

    def _elapsed_text(self) -> str:
        return format_duration(time.monotonic() - self._started)


def _bar(done: int, total: int, text: str) -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    grid.add_row(ProgressBar(total=total, completed=min(done, total)), text)
    return grid


def finished_row(event: events.ProbeFinished, progress: Progress) -> Table:
    """Return the line of a finished probe."""
    measurement = event.measurement
    what = Text()
    if event.best:
        # In front, so that it does not wrap.
        what.append("best so far  ", style="bold green")
    what.append(progress.finished_text(event))
    reason = reason_text(measurement)
    if reason:
        what.append(f"\n{words.printable(reason)}", style="dim")
    return probe_row(
        str(event.number),
        words.status_text(measurement.status),
        words.bytes_or_dash(measurement.used_bytes),
        words.number_or_dash(measurement.tokens_per_second),
        what,
        _STYLES.get(measurement.status, "red"),
    )


def probe_row(number: str, status: str, held: str, rate: str, what: Text, style: str) -> Table:
    """Return one line of the list of probes; long texts wrap within their column."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=4, justify="right")
    grid.add_column(width=13, style=style)
    grid.add_column(width=10, justify="right", no_wrap=True)
    grid.add_column(width=10, justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(number, status, held, rate, what)
    return grid


def _provisional(ranked: events.Ranked) -> Iterator[Text]:
    """Yield the lines of a provisional ranking; long ones end in an ellipsis."""
    yield _one_line(_TITLE, "bold")
    yield _one_line(_ranked_row("needs", "to spare", "tok/s", f"differences from {words.BASELINE_NAME}"), "bold")
    for estimate in ranked.best:
        needs, spare, _ = words.memory_cells(estimate)
        choices = words.differences(estimate.candidate, ranked.baseline)
        rate = words.predicted_rate(estimate, words.number_or_dash(estimate.tokens_per_second))
        row = _ranked_row(needs, spare, rate, choices)
        yield _one_line(row, "" if estimate.fits else "red")


def _ranked_row(*cells: str) -> str:
    *figures, choices = cells
    return "".join(f"{cell:>{width}}  " for cell, width in zip(figures, _WIDTHS, strict=True)) + choices


def _one_line(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")
