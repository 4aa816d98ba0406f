"""Memory of ``autotune lengths`` for millions of rows, in the command's process and in the others.

Run ``python -m benchmarks.lengths.memory``; it prints a Markdown table. The lengths are drawn, and almost all rows are
different: no row is tokenised, and all else is what the command does. With ``--tokens``, rows of tokens are written and
read instead, which takes minutes for each million.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from autotune.app.workload import WorkloadReader
from autotune.core.documents.length_report import length_report
from autotune.core.jobs.protocol import Job, PrepareRequest
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.workload import DatasetSource, ModelSource, Workload
from autotune.probing import JobServer
from autotune.reporting.lengths import lengths_report
from autotune.reporting.terminal import show
from autotune.trainers import find_trainer, trainers
from autotune.units import MIB
from benchmarks.shapes import LLAMA_8B, write_model

_MODULE = "benchmarks.lengths.memory"
_ROWS = "AUTOTUNE_BENCHMARK_ROWS"
_WRITTEN_AT_ONCE = 10_000
_PEAK_FILE = "peak"


def main() -> None:
    """Read the lengths of rows and print the table."""
    parser = argparse.ArgumentParser(description="Memory of the lengths of many rows.")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument(
        "--trainer", choices=sorted(trainers()), default="dpo", help="dpo has the most numbers for each row"
    )
    parser.add_argument("--tokens", action="store_true", help="write and read rows of tokens, for the trainer sft")
    asked = parser.parse_args()
    trainer = find_trainer("sft" if asked.tokens else asked.trainer)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not asked.tokens:
        os.environ[_ROWS] = str(asked.rows)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        server = stack.enter_context(JobServer("cpu", jobs_module=_MODULE))
        write_model(folder / "model", LLAMA_8B)
        (folder / "rows.jsonl").write_text(2 * f"{json.dumps(trainer.stand_in)}\n", encoding="utf-8")
        source = DatasetSource("rows", "json", str(folder / "rows.jsonl"))
        if asked.tokens:
            source = DatasetSource("rows", "parquet", str(_written(folder / "rows.parquet", asked.rows)))
        started = time.monotonic()
        reader = WorkloadReader(server, folder, lambda _: None)
        workload = reader.read(trainer.name, ModelSource(str(folder / "model")), source)
        report, read = length_report(workload), time.monotonic()
        show(lengths_report(report), Console(file=io.StringIO()))
        parent, job = _peak_bytes(), int((folder / "prepare" / _PEAK_FILE).read_text())
    print("| trainer | rows | different | read | parent at most | job at most |")
    print("|---|--:|--:|--:|--:|--:|")
    different = len(workload.dataset.documents.groups)
    cells = f"{trainer.name} | {report.rows:,} | {different:,} | {read - started:.0f} s"
    print(f"| {cells} | {parent / MIB:.0f} MiB | {job / MIB:.0f} MiB |")


def _written(file: Path, rows: int) -> Path:
    """Write a file of rows of random tokens, for which no tokenizer is needed."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    schema = pa.schema({"input_ids": pa.list_(pa.int32())})
    with pq.ParquetWriter(file, schema) as writer:
        for start in range(0, rows, _WRITTEN_AT_ONCE):
            ends = np.append(0, random.integers(1, 60, size=min(_WRITTEN_AT_ONCE, rows - start)).cumsum())
            tokens = random.integers(3, 1000, size=ends[-1], dtype=np.int32)
            lists = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(tokens))
            writer.write_table(pa.table([lists], schema))
    return file


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _prepare(request: PrepareRequest, context: object) -> Workload:
    """Do the real job, in whose reply the lengths may be drawn; it runs in a process of its own."""
    import numpy as np

    from autotune.step.data.profile import documents_of
    from autotune.step.job import JobContext
    from autotune.step.jobs.prepare import prepare

    assert isinstance(context, JobContext)
    reply = prepare(request, context)
    if _ROWS in os.environ:
        trainer, rows = find_trainer(request.trainer), int(os.environ[_ROWS])
        random = np.random.default_rng(0)
        lengths = np.stack([random.lognormal(6, 0.8, rows).astype(np.int64) + 1 for _ in trainer.parts], axis=1)
        documents = documents_of(trainer, lengths, np.ones(rows, dtype=np.int64), None, keeps_end=False)
        profile = replace(reply.dataset, lengths=LengthDistribution(documents.widths), several=documents)
        reply = replace(reply, dataset=profile)
    (context.folder / _PEAK_FILE).write_text(str(_peak_bytes()))
    return reply


JOBS = {Job.PREPARE: _prepare}


if __name__ == "__main__":
    main()
