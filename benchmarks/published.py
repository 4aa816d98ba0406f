"""Public tables of measured memory, beside what a trace of the same training loop says; one error for each row.

    PYTHONPATH=. python benchmarks/published.py                         # PEFT's method comparison
    PYTHONPATH=. python benchmarks/published.py --litgpt CHECKOUT       # Lit-GPT's resource table, with its own code
    PYTHONPATH=. python benchmarks/published.py --xmem                  # xMem's runs, with what four estimators said
    PYTHONPATH=. python benchmarks/published.py --only lora/            # rows whose names begin so
    PYTHONPATH=. python benchmarks/published.py --skip boft/llama-3.2-3B-default      # it takes as long as all others

It prints Markdown; the committed results are in `published.md`. What software is traced is what can be imported: the
published versions go before the installed ones on PYTHONPATH (`pip install --no-deps --target`). Lit-GPT also needs
lightning, lightning-utilities and torchmetrics there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.published_render import rendered
from benchmarks.published_rivals import rivals_rendered
from benchmarks.published_tables import Outcome, Row, Table, load

_LOOPS = {
    "metamathqa": "benchmarks.published_metamathqa",
    "litgpt": "benchmarks.published_litgpt",
    "xmem": "benchmarks.published_xmem",
}
_TRACED_WITH = ("torch", "transformers", "peft", "bitsandbytes")


def main() -> None:
    """Trace the rows of the chosen table and print them."""
    parser = argparse.ArgumentParser(description="Traced against published memory.")
    parser.add_argument("--litgpt", type=Path, metavar="CHECKOUT", help="a checkout of Lit-GPT: trace its table")
    parser.add_argument("--xmem", action="store_true", help="trace xMem's runs")
    parser.add_argument("--only", default="", metavar="PREFIX", help="rows whose names begin so")
    parser.add_argument("--skip", action="append", default=[], metavar="NAME", help="a row that is not traced")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    name = "litgpt" if arguments.litgpt else "xmem" if arguments.xmem else "metamathqa"
    if arguments.litgpt:
        sys.path.insert(0, str(arguments.litgpt))
    table = load(name)
    rows = [row for row in table.rows if row.name.startswith(arguments.only)]
    traced = [row for row in rows if row.name not in arguments.skip]
    outcomes = {row.name: Outcome(failure="left out of this run: it takes too long") for row in rows}
    for row, outcome in zip(traced, outcomes_of(name, table, traced, arguments.workers), strict=True):
        outcomes[row.name] = outcome
        print(f"{row.name}: {outcome}", file=sys.stderr, flush=True)
    traced_with = _TRACED_WITH[:2] if arguments.xmem else _TRACED_WITH
    versions = ", ".join(f"{package} {import_module(package).__version__}" for package in traced_with)
    if arguments.litgpt:
        versions += f", Lit-GPT from the folder {arguments.litgpt.name}"
    render = rivals_rendered if arguments.xmem else rendered
    print(render(table, [(row, outcomes[row.name]) for row in rows], versions))


def outcomes_of(name: str, table: Table, rows: Sequence[Row], workers: int) -> Iterator[Outcome]:
    """Yield what becomes of each row, traced in processes of their own."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(partial(outcome_of, name, table), rows)


def outcome_of(name: str, table: Table, row: Row) -> Outcome:
    """Trace one row in this process."""
    started = time.perf_counter()
    loop: Any = import_module(_LOOPS[name])
    try:
        found: Outcome = loop.outcome({**table.loop, **row.settings}, table.capability)
    except Exception as error:  # noqa: BLE001 (a row that cannot be traced is a result, whatever it raises)
        return Outcome(failure=_sentence(error), seconds=time.perf_counter() - started)
    return found


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{type(error).__name__}: {lines[0]}"


if __name__ == "__main__":
    main()
