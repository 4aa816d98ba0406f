"""Adds the traced estimates of its candidates to a table of `record_table.py`.

python -m benchmarks.replay.estimate_table [--table long] [--peaks]

Each is traced at its own sizes. Nothing is probed, but operators are measured, so that this has to run on the machine
that the table was recorded on. With `--peaks`, times follow from the CPU's peak speeds instead, and nothing is written.
Predicted rates are then compared with the recorded ones, after one factor: that of TRL's default, or where that does
not fit, of what is predicted to be the fastest.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from autotune.app.predictions import device_of, speeds_of, times_of
from autotune.app.requests import traces_of
from autotune.core.events import ignore
from autotune.inspection.machine import machine as inspect_machine
from autotune.inspection.model import model_source
from autotune.planning.evaluator import Evaluator
from autotune.planning.tracing.cache import Cache
from autotune.probing.tracing import ServerTracer
from benchmarks.gpu.accuracy import spearman
from benchmarks.replay.record_table import PARTS
from benchmarks.replay.tables import RECORDED, Table, read_table, write_table

_AT_ONCE = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace and write; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=PARTS, action="append")
    parser.add_argument("--peaks", action="store_true", help="predict times from peak speeds, and write nothing")
    asked = parser.parse_args(arguments)
    for name in asked.table or PARTS:
        file = RECORDED / f"{name}.json.gz"
        with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
            model, _ = PARTS[name].built(Path(folder) / "workload")
            table = estimated(read_table(file), model, Path(folder), measures=not asked.peaks)
        if not asked.peaks:
            write_table(table, file)
        print(f"{name}: {compared(table)}", flush=True)
    return 0


def compared(table: Table) -> str:
    """Return how predicted rates compare with measured ones, once one of them is known, as a sentence."""
    rates = {
        row.candidate: (row.traced.tokens_per_second, row.measurement.tokens_per_second)
        for row in table.rows
        if row.traced is not None and row.measurement.tokens_per_second and row.traced.tokens_per_second
    }
    predicted, measured = ([pair[side] or 0.0 for pair in rates.values()] for side in (0, 1))
    first = rates.get(table.problem().baseline) or max(rates.values(), key=lambda pair: pair[0] or 0.0)
    factor = (first[1] or 0.0) / (first[0] or 1.0)
    errors = sorted(abs(factor * one / other - 1) for one, other in zip(predicted, measured, strict=True))
    middle, high = median(errors), errors[int(0.9 * len(errors))]
    correlation = spearman(predicted, measured)
    return (
        f"{len(errors)} candidates: rank correlation {correlation:.3f}, error after one probe {middle:.1%} (median),"
        f" {high:.1%} (90 %), factor {factor:.2f}"
    )


def estimated(table: Table, model: Path, folder: Path, *, measures: bool) -> Table:
    """Return the table with traced estimates of its candidates on the machine that it was recorded on.

    Args:
        model: that of its workload.
        measures: whether operators are measured; else times follow from peak speeds.
    """
    workload = replace(table.workload, model_source=model_source(str(model), "random"))
    problem = replace(table, workload=workload).problem()
    candidates = [row.candidate for row in table.rows]
    started = time.monotonic()
    with ServerTracer(inspect_machine("cpu").hardware.cores, ignore) as tracer:
        cache = Cache(folder / "cache")
        speeds = speeds_of(table.machine, tracer.server, folder, cache)
        print(speeds, flush=True)
        measured_on = (table.machine, speeds, table.limit_bytes, tracer.server, tracer, cache)
        times = times_of(*measured_on) if measures else None
        traces = traces_of(workload, table.machine, tracer, cache, times=times)
        device = device_of(table.machine.hardware, lambda _: speeds)
        # A few at once, as in a search: operators are measured for a limited time after each call.
        for start in range(0, len(candidates), _AT_ONCE):
            Evaluator(problem, device, table.limit_bytes, traces).run(candidates[start : start + _AT_ONCE])
        evaluator = Evaluator(problem, device, table.limit_bytes, traces)
        traced = dict(zip(candidates, evaluator.run(candidates), strict=True))
        print(f"{traces.count} traces in {time.monotonic() - started:.0f} s", flush=True)
    rows = (replace(row, traced=traced[row.candidate]) for row in table.rows)
    return replace(table, rows=tuple(rows))


if __name__ == "__main__":
    sys.exit(main())
