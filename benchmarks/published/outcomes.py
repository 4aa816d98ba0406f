"""Traces the rows of a table, each in a separate process, by the training loop of the table."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks.published.tables import Outcome, Row, Table

LOOPS = {
    "metamathqa": "benchmarks.published.metamathqa",
    "litgpt": "benchmarks.published.litgpt",
    "xmem": "benchmarks.published.xmem",
    "fms": "benchmarks.published.trl_ranks",
    "fsdp2": "benchmarks.published.fsdp2",
    "reports": "benchmarks.published.trl_ranks",
    "swift": "benchmarks.published.trl_ranks",
    "torchtitan": "benchmarks.published.torchtitan",
}
"""The module that has the loop of each table."""


def outcomes_of(name: str, table: Table, rows: Sequence[Row], workers: int) -> Iterator[Outcome]:
    """Yield the outcome of each row, traced in a separate process."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(partial(outcome_of, name, table), rows)


def outcome_of(name: str, table: Table, row: Row) -> Outcome:
    """Trace one row in this process."""
    started = time.perf_counter()
    loop: Any = import_module(LOOPS[name])
    try:
        found: Outcome = loop.outcome({**table.loop, **row.settings}, table.capability)
    except Exception as error:  # noqa: BLE001 (a row that cannot be traced is a result, whatever it raises)
        return Outcome(failure=_sentence(error), seconds=time.perf_counter() - started)
    return found


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{type(error).__name__}: {lines[0]}"
