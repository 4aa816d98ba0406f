"""Runs a search whose probe hangs at a given call, so that a test can kill it there: URL, log file, call number."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from autotune.core.candidate import Candidate
from autotune.core.measurement import Measurement, Schedule
from tests.study.replayed import measurement
from tests.study.running import PATIENT, Run


def main(url: str, log: Path, hang_at: int) -> None:
    """Search, and write a line to the log at the beginning of each probe."""
    calls = 0

    def probe(number: int, candidate: Candidate, schedule: Schedule, seconds_left: float | None) -> Measurement:
        nonlocal calls
        calls += 1
        longer = schedule == PATIENT.confirmation
        with log.open("a") as lines:
            lines.write(f"{number} {'confirmation' if longer else 'probe'}\n")
        if calls == hang_at:
            time.sleep(600)
        return measurement(candidate)

    Run(url)(probe)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
