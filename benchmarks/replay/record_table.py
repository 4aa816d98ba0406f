"""Probes every legal candidate of a part of the small example's space, and records what each showed.

OMP_NUM_THREADS=1 python -m benchmarks.replay.record_table [--output benchmarks/replay/recorded/small_workload.json]

As `make probe` does it: a budget of 900 MiB, one thread, the schedule of `--effort quick`. The order is shuffled, so
that a machine that slows down on the way does not look like a technique. There are three rounds, since a machine that
others use as well slows down without a warning, and since memory on a CPU is not the same twice. Rows are written as
they come; a second call goes on where the first ended.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune.app.problem import attentions, global_batch_of
from autotune.app.requests import probe_request
from autotune.app.workload import WorkloadReader
from autotune.core.events import ignore
from autotune.inspection.dataset import dataset_source
from autotune.inspection.machine import environment
from autotune.inspection.machine import machine as inspect_machine
from autotune.inspection.model import model_source
from autotune.probing import JobServer, probe
from autotune.units import MIB
from benchmarks.replay.tables import RECORDED, Row, Table, legal_candidates, options, placeless, read_table, write_table
from benchmarks.shapes import small_workload

BUDGET_BYTES = 900 * MIB
MARGIN = 0.05
_PROBES_BETWEEN_WRITES = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Record what is missing; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RECORDED / "small_workload.json")
    parser.add_argument("--rounds", type=int, default=3, help="probes of each candidate (default: 3)")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
        record(Path(folder), asked.output, asked.rounds)
    return 0


def record(folder: Path, output: Path, rounds: int) -> None:
    """Build the workload and probe every candidate until ``output`` has so many rounds of it."""
    model, data = small_workload(folder / "small")
    wanted, machine = options(), inspect_machine("cpu")
    threads = machine.hardware.threads
    with JobServer("cpu", threads=threads) as server:
        reader = WorkloadReader(server, folder, ignore)
        workload = reader.read(wanted.trainer.name, model_source(str(model), "random"), dataset_source(str(data)))
        workload = reader.check_attention(workload, machine, attentions(wanted, machine))
        table = Table(
            placeless(workload),
            machine,
            environment(machine),
            global_batch_of(wanted, machine),
            int(BUDGET_BYTES * (1 - MARGIN)),
            threads,
        )
        if output.exists():
            table = replace(table, rows=read_table(output).rows, seconds=read_table(output).seconds)
        problem = replace(table, workload=workload).problem()
        rows = {row.candidate: row for row in table.rows}
        rows |= {candidate: Row(candidate, ()) for candidate in legal_candidates(problem) if candidate not in rows}
        missing = [
            candidate
            for number in range(rounds)
            for candidate in random.Random(number).sample(list(rows), len(rows))
            if len(rows[candidate].measurements) <= number
        ]
        started = time.monotonic()
        for number, candidate in enumerate(missing):
            request = probe_request(problem, candidate, wanted.effort.probe, table.limit_bytes, wanted.seed)
            shown = probe(server, request, folder / f"probe-{number}", wanted.effort.probe_timeout_seconds)
            row = rows[candidate]
            rows[candidate] = replace(row, measurements=(*row.measurements, shown))
            if number % _PROBES_BETWEEN_WRITES == 0 or number == len(missing) - 1:
                kept = tuple(row for row in rows.values() if row.measurements)
                seconds = table.seconds + time.monotonic() - started
                write_table(replace(table, rows=kept, seconds=seconds), output)
                print(f"{number + 1} of {len(missing)}: {shown.status.value}, {shown.wall_seconds:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
