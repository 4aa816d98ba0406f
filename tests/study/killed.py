"""Kills a search during one of its runs."""

from __future__ import annotations

import multiprocessing
import signal
import time
from pathlib import Path

from autotune.core.measurement import Measurement
from autotune.study.problem import ProbeRun
from tests.study.replayed import measurement
from tests.study.running import Run


def kill_in_the_middle(url: str, log: Path, call: int) -> list[str]:
    """Run a search in a process, kill it while the given probe runs, and return a line for each probe it began."""
    # The libraries of a forked process are imported.
    process = multiprocessing.get_context("fork").Process(target=_search, args=(url, log, call))
    process.start()
    deadline = time.monotonic() + 240
    while not (log.exists() and log.read_text().count("\n") == call):
        assert process.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return log.read_text().splitlines()


def _search(url: str, log: Path, hang_at: int) -> None:
    """Search, write a line to the log at the beginning of each probe, and hang in a given one."""
    calls = 0

    def probe(run: ProbeRun, seconds_left: float | None) -> Measurement:
        nonlocal calls
        calls += 1
        with log.open("a") as lines:
            lines.write(f"{run.number} {run.purpose}\n")
        if calls == hang_at:
            time.sleep(600)
        return measurement(run.candidate)

    Run(url)(probe, resume=True)
