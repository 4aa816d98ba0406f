"""The report of ``autotune dry-run``: the answer, where memory ran out, and peaks by step and process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.core.dry_run import DryOutcome, DryRun, FailedAllocation, Followed, Span
from autotune.reporting.document import TONES, Bar, Document, Section, Table, Verdict, listing
from autotune.reporting.words import short_path
from autotune.units import format_bytes

# With more steps, only the peak step of each process is shown; all are in --json.
_MOST_ROWS = 16


def dry_run_report(found: DryRun) -> Document:
    """Return the report about a dry run."""
    # A launcher may hold some GPU memory too. If no process trained, all are shown.
    training = [each for each in found.processes if each.loaders or each.steps or each.failed_allocations]
    training = [each for each in training or found.processes if each.spans]
    rows = [(each, span) for each in training for span in each.spans]
    if len(rows) > _MOST_ROWS:
        rows = [(each, max(each.spans, key=lambda span: span.held_bytes)) for each in training]
    return Document(
        verdict=Verdict(found.headline, TONES[found.exit_code], evidence=tuple(_evidence(found))),
        sections=(
            *([Section("Peaks", (_table(rows, several=found.gpus > 1),))] if rows else []),
            *listing("Notes", found.notes),
        ),
    )


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
        file = short_path(Path(failed.place.file))
        yield f"{file}:{failed.place.line}, in {failed.place.function}: {failed.place.text}"
    if failed.place.within:
        yield f"below it, {failed.place.within}" if failed.place.file else failed.place.within
    if spare is not None and spare < 0:
        yield (
            f"{format_bytes(failed.requested_bytes)} asked for and {format_bytes(failed.free_bytes)} free, with"
            f" {format_bytes(failed.allocated_bytes)} allocated and {format_bytes(failed.reserved_bytes)} reserved by"
            " PyTorch"
        )


def _table(rows: Sequence[tuple[Followed, Span]], *, several: bool) -> Table:
    cells = tuple(
        (
            *((str(each.rank), str(span.device)) if several else ()),
            str(span.step) if span.step else "before",
            *map(format_bytes, (span.allocated_bytes, span.reserved_bytes, span.held_bytes)),
            Bar(span.held_bytes / span.total_bytes),
        )
        for each, span in rows
    )
    where = ("rank", "GPU") if several else ()
    columns = (*where, "step", "allocated", "reserved", "held of the GPU", "")
    return Table(columns, cells, words=(len(where),))
