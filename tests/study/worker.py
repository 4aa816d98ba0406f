"""Searches a shared study; probes take a set time and return values of a table, without training.

Arguments: URL of the storage, log of the probes, file for the outcome, trials, seconds of a probe, seconds of a lease,
and `apart` if no worker may see the processes of its machine, as if each ran on its own machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from autotune.core.candidate import Choice
from autotune.core.events import StageStarted
from autotune.core.files.codec import encode
from autotune.core.measurement import Measurement
from autotune.study import roster
from autotune.study.problem import ProbeRun, Sharing
from tests.study.replayed import BASELINE, TableProblem, measurement
from tests.study.running import PATIENT, Run

_SMALL = 60


class WideProblem(TableProblem):
    """The table with a knob that changes nothing, for searches that the table alone is too small for."""

    @property
    def choices(self) -> Mapping[str, tuple[Choice, ...]]:
        """Eight times the candidates."""
        return {**super().choices, "idle": tuple(range(8))}


def main(url: str, log: Path, result: Path, trials: int, probe_seconds: float, lease_seconds: float) -> None:
    """Search, write a line to the log at the beginning and the end of each probe, and the outcome to a file."""

    def say(*words: object) -> None:
        # One write of a short line to the end of a file is not mixed with those of other processes.
        with log.open("a") as lines:
            lines.write(" ".join(map(str, (os.getpid(), *words))) + "\n")

    def held() -> bool:
        ended = log.read_text().count(" ends ")
        return any(int(file.suffix[1:]) <= ended for file in log.parent.glob("hold.*"))

    def replayed_probe(run: ProbeRun, seconds_left: float | None) -> Measurement:
        say("begins", run.number, run.purpose)
        time.sleep(probe_seconds)
        while held():
            time.sleep(0.02)
        say("ends", run.number, run.purpose)
        return measurement(run.candidate)

    problem = TableProblem() if trials <= _SMALL else WideProblem(baseline=BASELINE.but(idle=0))
    search = Run(url, problem, sharing=Sharing(lease_seconds / 10, 10, 0.1, 120.0))
    # More than the trials of a test, so that the limit of trials ends the search.
    effort = replace(PATIENT, patience=trials, comparisons=2)
    outcome = search(replayed_probe, trials=trials, effort=effort, resume=True)
    for event in search.events:
        if isinstance(event, StageStarted):
            say("says", event.text)
    result.write_text(json.dumps(encode(outcome)))


if __name__ == "__main__":
    if sys.argv[7:] == ["apart"]:
        roster._machine = lambda: uuid.uuid4().hex
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), float(sys.argv[6]))
