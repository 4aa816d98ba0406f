"""Runs a search whose probe hangs at a given call, where a test kills it: URL, log file, call number."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from autotune.core.measurement import Measurement
from autotune.study.problem import ProbeRun
from tests.study.replayed import measurement
from tests.study.running import Run


def main(url: str, log: Path, hang_at: int) -> None:
    """Search, and write a line to the log at the beginning of each probe."""
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


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
