"""Adds the traced estimates of its candidates to a recorded table.

python -m benchmarks.replay.estimate_table [--table benchmarks/replay/recorded/small_workload.json]

Each is traced at its own sizes. Nothing is probed, but the CPU's speed is measured, so that this has to run on the
machine that the table was recorded on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune.app.ahead import device_of, speeds_of
from autotune.app.requests import traces_of
from autotune.core.events import ignore
from autotune.inspection.machine import machine as inspect_machine
from autotune.inspection.model import model_source
from autotune.planning.evaluator import Evaluator
from autotune.planning.tracing.cache import Cache
from autotune.probing.tracing import ServerTracer
from benchmarks.replay.tables import RECORDED, Table, read_table, write_table
from benchmarks.shapes import small_workload


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace and write; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=RECORDED / "small_workload.json")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
        write_table(estimated(read_table(asked.table), Path(folder)), asked.table)
    return 0


def estimated(table: Table, folder: Path) -> Table:
    """Return the table with traced estimates of its candidates on the machine that it was recorded on."""
    model, _ = small_workload(folder / "small")
    workload = replace(table.workload, model_source=model_source(str(model), "random"))
    problem = replace(table, workload=workload).problem()
    candidates = [row.candidate for row in table.rows]
    started = time.monotonic()
    with ServerTracer(inspect_machine("cpu").hardware.cores, ignore) as tracer:
        cache = Cache(folder / "cache")
        traces = traces_of(workload, table.machine, tracer, cache)
        speeds = speeds_of(table.machine, tracer.server, folder, cache)
        print(speeds, flush=True)
        device = device_of(table.machine.hardware, lambda: speeds)
        evaluator = Evaluator(problem, device, table.limit_bytes, traces)
        traced = dict(zip(candidates, evaluator.run(candidates), strict=True))
        print(f"{traces.count} traces in {time.monotonic() - started:.0f} s", flush=True)
    rows = (replace(row, traced=traced[row.candidate]) for row in table.rows)
    return replace(table, rows=tuple(rows))


if __name__ == "__main__":
    sys.exit(main())
