"""``autotune dry-run`` in a terminal: the answer, where memory ran out, and peaks by step and process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from autotune.core.dry_run import DryOutcome, DryRun, FailedAllocation, Followed, Span
from autotune.reporting.check import Hanging
from autotune.reporting.copied import show
from autotune.reporting.words import bar, printable, said_path
from autotune.units import format_bytes

_STYLES: Mapping[DryOutcome, str] = {
    DryOutcome.FITS: "bold green",
    DryOutcome.BATCHES_FIT: "bold yellow",
    DryOutcome.UNKNOWN: "bold yellow",
    DryOutcome.DOES_NOT_FIT: "bold red",
    DryOutcome.CANNOT_RUN: "bold red",
}
_BAR_WIDTH = 20
# More rows are for --json.
_MOST_ROWS = 16


def show_dry_run(found: DryRun, console: Console) -> None:
    """Print the result of a dry run."""
    for part in drawn(found):
        show(part, console)


def drawn(found: DryRun) -> Iterator[RenderableType]:
    """Yield the parts of a result, top to bottom."""
    yield Text(printable(found.headline), style=_STYLES[found.outcome])
    yield from (Hanging(Text(printable(line))) for line in _evidence(found))
    rows = [(each, span) for each in _training(found) for span in each.spans]
    if rows:
        yield Text()
        yield _table(rows if len(rows) <= _MOST_ROWS else list(_fullest(found)), several=found.gpus > 1)
    if found.notes:
        yield Text("\nNotes", style="bold")
        yield from (Hanging(Text(printable(note))) for note in found.notes)


def _training(found: DryRun) -> list[Followed]:
    """Return the processes that train; a launcher can hold a little of a GPU too. All, if none got that far."""
    training = [each for each in found.processes if each.loaders or each.steps or each.failed_allocations]
    return training or list(found.processes)


def _fullest(found: DryRun) -> Iterator[tuple[Followed, Span]]:
    """Yield each process with the step in which it held the most of its GPU."""
    for each in _training(found):
        if each.spans:
            yield each, max(each.spans, key=lambda span: span.held_bytes)


def _evidence(found: DryRun) -> Iterator[str]:
    yield f"{' '.join(found.command)}, on {found.gpus} x {found.gpu}, {format_bytes(found.total_bytes)}"
    if found.failed is not None:
        yield from _failed(found.failed, found.spare_bytes)
        return
    if found.spare_bytes is not None and found.outcome in (DryOutcome.FITS, DryOutcome.BATCHES_FIT):
        yield f"{format_bytes(found.spare_bytes)} to spare on the fullest GPU"
        if found.reason:
            yield found.reason


def _failed(failed: FailedAllocation, spare: int | None) -> Iterator[str]:
    if failed.place.text:
        file = said_path(Path(failed.place.file))
        yield f"{file}:{failed.place.line}, in {failed.place.function}: {failed.place.text}"
    if failed.place.within:
        yield f"below it, {failed.place.within}" if failed.place.file else failed.place.within
    if spare is not None and spare < 0:
        yield (
            f"{format_bytes(failed.requested_bytes)} asked for and {format_bytes(failed.free_bytes)} free, with"
            f" {format_bytes(failed.allocated_bytes)} allocated and {format_bytes(failed.reserved_bytes)} reserved by"
            " PyTorch"
        )


def _table(rows: list[tuple[Followed, Span]], *, several: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    if several:
        table.add_column("rank", justify="right")
        table.add_column("GPU", justify="right")
    table.add_column("step")
    for name in ("allocated", "reserved", "held of the GPU"):
        table.add_column(name, justify="right")
    table.add_column("")
    for each, span in rows:
        step = str(span.step) if span.step else "before"
        sizes = [format_bytes(size) for size in (span.allocated_bytes, span.reserved_bytes, span.held_bytes)]
        where = [str(each.rank), str(span.device)] if several else []
        table.add_row(*where, step, *sizes, bar(span.held_bytes / span.total_bytes, _BAR_WIDTH))
    return table
