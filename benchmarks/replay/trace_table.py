"""Traces every legal candidate of parts of an 8B shape's space, to compare a plan's search with brute force.

python -m benchmarks.replay.trace_table [--table dpo]

Three tables: SFT on an H100, DPO on long pairs, also with LoRA, on an A100, and SFT with LoRA and quantisation on an
RTX 4090. No GPU is needed. `tests/study/test_improvement.py` replays the search on them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path

from autotune.app.planned import planned_machine, planned_workload
from autotune.app.problem import global_batch_of
from autotune.app.requests import traces_of
from autotune.core.events import ignore
from autotune.inspection.dataset import dataset_source
from autotune.inspection.machine import environment, memory_budget
from autotune.inspection.model import model_source
from autotune.planning.evaluator import Evaluator
from autotune.planning.tracing.cache import Cache
from autotune.probing.tracing import ServerTracer
from benchmarks.replay.tables import RECORDED, Row, Table, legal_candidates, options, placeless, write_table
from benchmarks.shapes import LETTER, LLAMA_8B, write_model

_DOCUMENTS = 64
_AT_ONCE = 32
"""Candidates that are traced between two lines of progress."""


@dataclass(frozen=True)
class Part:
    """A part of a space, all of which is traced.

    Attributes:
        tokens: of each document, all of which are equally long: a candidate is traced at one size.
    """

    trainer: str
    gpu: str
    tokens: int


PARTS: Mapping[str, Part] = {
    "full": Part("sft", "H100-80GB", 1024),
    "dpo": Part("dpo", "A100-80GB", 4000),
    "lora": Part("sft", "RTX4090", 1024),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Trace the requested tables; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=PARTS, action="append")
    asked = parser.parse_args(arguments)
    for name in asked.table or PARTS:
        with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
            write_table(traced(PARTS[name], f"8b_{name}_space.yaml", Path(folder)), RECORDED / f"8b_{name}.json.gz")
    return 0


def traced(part: Part, space: str, folder: Path) -> Table:
    """Return the table of a part of a space."""
    model = write_model(folder / "model", LLAMA_8B)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(part)), encoding="utf-8")
    planned, wanted, cache = planned_machine(part.gpu), options(space, part.trainer), Cache(folder / "cache")
    budget_bytes = memory_budget(None, planned.hardware)
    with ServerTracer(planned.hardware.cores, ignore) as tracer:
        sources = model_source(str(model), "random"), dataset_source(str(data))
        workload = planned_workload(wanted, *sources, tracer, cache, ignore)
        batch = global_batch_of(wanted, planned)
        table = Table(placeless(workload), planned, environment(planned), batch, budget_bytes, 1, space=space)
        problem = replace(table, workload=workload).problem()
        evaluator = Evaluator(problem, planned.gpu, budget_bytes, traces_of(workload, planned, tracer, cache))
        candidates = legal_candidates(problem)
        started = time.monotonic()
        for number in range(0, len(candidates), _AT_ONCE):
            evaluator.run(candidates[number : number + _AT_ONCE])
            done, seconds = min(number + _AT_ONCE, len(candidates)), time.monotonic() - started
            print(f"{space}: {done} of {len(candidates)} in {seconds:.0f} s", flush=True)
    found = tuple(Row(candidate, (), evaluator.estimate(candidate)) for candidate in candidates)
    return replace(table, rows=found, seconds=time.monotonic() - started)


def rows(part: Part) -> Iterator[Mapping[str, str]]:
    """Yield documents of this number of letters, each of which is a token."""
    half = LETTER * (part.tokens // 2)
    pair = {"prompt": half, "chosen": half, "rejected": half}
    yield from repeat(pair if part.trainer == "dpo" else {"text": 2 * half}, _DOCUMENTS)


if __name__ == "__main__":
    sys.exit(main())
