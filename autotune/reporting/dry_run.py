"""The report of ``autotune dry-run``: the answer, where memory ran out, and peaks by step and process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.core.documents.dry_run import DryOutcome, DryRun, FailedAllocation, ProcessRecord, StepMemory
from autotune.reporting.document import TONES, Bar, Document, Section, Table, Verdict, listing
from autotune.reporting.words import short_path
from autotune.units import format_bytes

# With more steps, only the peak step of each process is shown; all are in --json.
_MAX_ROWS = 16


def dry_run_report(run: DryRun) -> Document:
    """Return the report about a dry run."""
    # A launcher may use some GPU memory, too. If no process trained, all are shown.
    training = [process for process in run.processes if process.loaders or process.steps or process.failed_allocations]
    training = [process for process in training or run.processes if process.spans]
    rows = [(process, span) for process in training for span in process.spans]
    if len(rows) > _MAX_ROWS:
        rows = [(process, max(process.spans, key=lambda span: span.used_bytes)) for process in training]
    return Document(
        verdict=Verdict(run.headline, TONES[run.exit_code], evidence=tuple(_evidence(run))),
        sections=(
            *([Section("Peaks", (_table(rows, several=run.gpus > 1),))] if rows else []),
            *listing("Notes", run.notes),
        ),
    )


def _evidence(run: DryRun) -> Iterator[str]:
    yield f"{' '.join(run.command)}, on {run.gpus} x {run.gpu}, {format_bytes(run.total_bytes)}"
    if run.failed is not None:
        yield from _failure_lines(run.failed, run.spare_bytes)
        return
    if run.spare_bytes is not None and run.outcome in (DryOutcome.FITS, DryOutcome.BATCHES_FIT):
        yield f"{format_bytes(run.spare_bytes)} to spare on the fullest GPU"
        if run.reason:
            yield run.reason


def _failure_lines(failed: FailedAllocation, spare: int | None) -> Iterator[str]:
    if failed.place.text:
        file = short_path(Path(failed.place.file))
        yield f"{file}:{failed.place.line}, in {failed.place.function}: {failed.place.text}"
    if failed.place.within:
        yield f"below it, {failed.place.within}" if failed.place.file else failed.place.within
    if spare is not None and spare < 0:
        yield (
            f"{format_bytes(failed.requested_bytes)} requested and {format_bytes(failed.free_bytes)} free, with"
            f" {format_bytes(failed.allocated_bytes)} allocated and {format_bytes(failed.reserved_bytes)} reserved by"
            " PyTorch"
        )


def _table(rows: Sequence[tuple[ProcessRecord, StepMemory]], *, several: bool) -> Table:
    cells = tuple(
        (
            *((str(process.rank), str(span.device)) if several else ()),
            str(span.step) if span.step else "before",
            *map(format_bytes, (span.allocated_bytes, span.reserved_bytes, span.used_bytes)),
            Bar(span.used_bytes / span.total_bytes),
        )
        for process, span in rows
    )
    where = ("rank", "GPU") if several else ()
    columns = (*where, "step", "allocated", "reserved", "used on the GPU", "")
    return Table(columns, cells, words=(len(where),))
