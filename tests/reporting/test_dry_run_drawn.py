"""A dry run in a terminal: the answer, the place where memory ran out, and the memory of each process by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune.core.documents.dry_run import (
    CommandExit,
    DryOutcome,
    DryRun,
    FailedAllocation,
    Loader,
    ProcessRecord,
    SourceLine,
    StepMemory,
)
from autotune.reporting.dry_run import dry_run_report
from autotune.units import GIB
from tests.reporting.as_text import as_text

PLACE = SourceLine(
    "train.py", 42, "main", "loss.backward()", "transformers/models/llama/modeling_llama.py:80, in forward"
)
FAILED = FailedAllocation(2, 0, 3 * GIB, 20 * GIB, 21 * GIB, 2 * GIB, PLACE)


def process(rank: int, steps: int = 3) -> ProcessRecord:
    spans = tuple(
        StepMemory(step, rank, "card", (step + 1) * GIB, 11 * GIB, GIB, 24 * GIB) for step in range(steps + 1)
    )
    return ProcessRecord(100 + rank, rank, 1, True, "stopped", steps, spans, (Loader("largest first"),))


FITS = DryRun(
    outcome=DryOutcome.FITS,
    headline="fits: at most 12.00 GiB of 24.00 GiB used",
    reason="",
    command=("python", "train.py"),
    gpu="NVIDIA GeForce RTX 4090",
    gpus=1,
    total_bytes=24 * GIB,
    steps=3,
    used_bytes=12 * GIB,
    spare_bytes=12 * GIB,
    failed=None,
    processes=(process(0),),
    refused=(),
    notes=("Not counted: NCCL's buffers.",),
    ending=CommandExit(0),
    wall_seconds=8.0,
)
RAN_OUT = replace(
    FITS,
    outcome=DryOutcome.DOES_NOT_FIT,
    headline="does not fit: out of memory in step 2 at train.py:42, 3.00 GiB requested",
    spare_bytes=-GIB,
    failed=FAILED,
)


def drawn(found: DryRun, columns: int = 100) -> str:
    return as_text(dry_run_report(found), columns)


def test_what_fits_shows_what_is_spare_and_a_bar_for_each_step() -> None:
    lines = drawn(FITS).splitlines()
    assert lines[0] == FITS.headline
    assert "  12.00 GiB to spare on the fullest GPU" in lines
    shown = [line.split() for line in lines if "█" in line]
    assert [(row[0], row[1], row[5]) for row in shown] == [
        ("before", "1.00", "12.00"), ("1", "2.00", "12.00"), ("2", "3.00", "12.00"), ("3", "4.00", "12.00"),
    ]  # fmt: skip
    # Half of the GPU is half of the bar.
    assert {len(row[-1]) for row in shown} == {23}


def test_what_runs_out_shows_the_line_of_the_script_and_of_the_library_below() -> None:
    shown = drawn(RAN_OUT)
    assert "  train.py:42, in main: loss.backward()" in shown
    assert "below it, transformers/models/llama/modeling_llama.py:80, in forward" in shown
    assert "3.00 GiB requested and 2.00 GiB free, with 20.00 GiB allocated and 21.00 GiB reserved" in shown


@pytest.mark.parametrize(("ranks", "rows"), [(2, 8), (8, 8)])
def test_of_many_processes_each_is_shown_in_its_fullest_step(ranks: int, rows: int) -> None:
    lines = drawn(replace(FITS, gpus=ranks, processes=tuple(map(process, range(ranks))))).splitlines()
    assert sum("█" in line for line in lines) == rows
    assert any(line.split()[:3] == ["rank", "GPU", "step"] for line in lines)


@pytest.mark.parametrize("found", [FITS, RAN_OUT], ids=["fits", "ran-out"])
@pytest.mark.parametrize("columns", [80, 100])
def test_no_line_is_wider_than_the_terminal(found: DryRun, columns: int) -> None:
    assert max(map(len, drawn(found, columns).splitlines())) <= columns


def test_an_escape_in_the_script_s_words_is_not_obeyed() -> None:
    escaped: Any = replace(FITS, headline="not known: \x1b[2J", outcome=DryOutcome.UNKNOWN)
    assert "\x1b" not in drawn(escaped)
