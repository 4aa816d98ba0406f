"""Probes every legal candidate of a part of the search space, and records the measurements.

OMP_NUM_THREADS=1 python -m benchmarks.replay.record_table [--table long]

Four tables: SFT of the small example's Llama; SFT of a Qwen3 on long rows, with LoRA and optimizers; SFT of an OLMo 2
on short rows; DPO of a Gemma 3 on long pairs. One thread, the schedule of `--effort quick`. The order is shuffled, so
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.app.problem import attentions, global_batch_of
from autotune.app.requests import probe_request
from autotune.app.workload import WorkloadReader
from autotune.core.effort import EFFORTS
from autotune.core.events import ignore
from autotune.inspection.dataset import dataset_source
from autotune.inspection.machine import environment
from autotune.inspection.machine import machine as inspect_machine
from autotune.inspection.model import model_source
from autotune.probing import JobServer, probe
from autotune.units import MIB
from benchmarks.probe.soak_cases import Case, workload
from benchmarks.replay.tables import RECORDED, Row, Table, options, placeless, read_table, recordable, write_table
from benchmarks.shapes import small_workload

MARGIN = 0.05
_PROBES_BETWEEN_WRITES = 10
_SEED = 42
_EFFORT = EFFORTS["quick"]


@dataclass(frozen=True)
class Part:
    """A part of a space, all of which is probed.

    Attributes:
        case: model and rows; None: those of the small example.
    """

    budget_bytes: int
    trainer: str = "sft"
    case: Case | None = None

    def built(self, folder: Path) -> tuple[Path, Path]:
        """Write the model and the rows, and return them."""
        if not self.case:
            return small_workload(folder)
        named = workload(self.case, folder)
        return named["model"], named["dataset"]


PARTS: Mapping[str, Part] = {
    "small": Part(600 * MIB),
    "long": Part(1000 * MIB, case=Case("sft", "qwen3", "500MiB", "long")),
    "short": Part(100 * MIB, case=Case("sft", "olmo2", "100MiB", "short")),
    "dpo": Part(1000 * MIB, "dpo", Case("dpo", "gemma3_text", "1000MiB", "long")),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Record the missing rows; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=PARTS, action="append")
    parser.add_argument("--rounds", type=int, default=3, help="probes of each candidate (default: 3)")
    asked = parser.parse_args(arguments)
    for name in asked.table or PARTS:
        with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
            record(name, Path(folder), asked.rounds)
    return 0


def record(name: str, folder: Path, rounds: int) -> None:
    """Build the workload and probe every candidate until the table of this name has so many rounds of it."""
    part, output, space = PARTS[name], RECORDED / f"{name}.json.gz", f"{name}_space.yaml"
    model, data = part.built(folder / "workload")
    wanted, machine = options(space, part.trainer), inspect_machine("cpu")
    threads = machine.hardware.threads
    with JobServer("cpu", threads=threads) as server:
        reader = WorkloadReader(server, folder, ignore)
        read = reader.read(wanted.trainer.name, model_source(str(model), "random"), dataset_source(str(data)))
        read = reader.check_attention(read, machine, attentions(wanted, machine))
        table = Table(
            placeless(read),
            machine,
            environment(machine),
            global_batch_of(wanted, machine),
            int(part.budget_bytes * (1 - MARGIN)),
            threads,
            space=space,
        )
        if output.exists():
            table = replace(table, rows=read_table(output).rows, seconds=read_table(output).seconds)
        problem = replace(table, workload=read).problem()
        rows = {row.candidate: row for row in table.rows}
        rows |= {candidate: Row(candidate, ()) for candidate in recordable(problem) if candidate not in rows}
        missing = [
            candidate
            for number in range(rounds)
            for candidate in random.Random(number).sample(list(rows), len(rows))
            if len(rows[candidate].measurements) <= number
        ]
        started = time.monotonic()
        for number, candidate in enumerate(missing):
            request = probe_request(problem, candidate, _EFFORT.probe, table.limit_bytes, _SEED)
            shown = probe(server, request, folder / f"probe-{number}", _EFFORT.probe_timeout_seconds)
            row = rows[candidate]
            rows[candidate] = replace(row, measurements=(*row.measurements, shown))
            if number % _PROBES_BETWEEN_WRITES == 0 or number == len(missing) - 1:
                kept = tuple(row for row in rows.values() if row.measurements)
                seconds = table.seconds + time.monotonic() - started
                write_table(replace(table, rows=kept, seconds=seconds), output)
                print(f"{number + 1} of {len(missing)}: {shown.status.value}, {shown.wall_seconds:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
