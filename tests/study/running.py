"""Runs a search over the replayed table, with defaults for everything that a test does not set."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from os import PathLike
from pathlib import Path
from types import ModuleType

import alembic.util
from sqlalchemy import event
from sqlalchemy.engine import Engine

from autotune.core.effort import EFFORTS, Effort
from autotune.core.events import Event
from autotune.core.prediction import Predictor
from autotune.study.problem import Probe, Purpose, Record, SearchOutcome, Sharing, StudyStorage
from autotune.study.searching import search
from tests.study.replayed import LIMIT_BYTES, TableProblem

FINGERPRINT = {"model": "a", "dataset": "b"}
QUICK = Sharing(interval_seconds=3600.0, poll_seconds=0.05, patience_seconds=0.5)
"""No lease lapses, however slow the machine is: that a worker is gone is seen by its process."""
PATIENT = replace(EFFORTS["normal"], trials=9, patience=9)


@event.listens_for(Engine, "connect")
def unsynchronised(connection: object, _: object) -> None:
    """Let SQLite not wait for the disk at every commit of a search: only a machine that fails would lose anything."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")


_load = alembic.util.load_python_file


@cache
def _revision(file: Path) -> ModuleType:
    return _load(file.parent, file.name)


def _load_once(dir_: str | PathLike[str], filename: str | PathLike[str]) -> ModuleType:
    """Load each revision of Optuna's tables once: it compiles all of them each time that it opens a database.

    That is a tenth of the time of a search of a few probes.
    """
    file = Path(dir_) / filename
    # The other one migrates a database while it is loaded.
    return _load(dir_, filename) if file.name == "env.py" else _revision(file)


alembic.util.load_python_file = _load_once


@dataclass
class Run:
    """A search in a study.

    Attributes:
        url: of the study's storage.
        events: what the listener heard.
    """

    url: str
    problem: TableProblem = field(default_factory=TableProblem)
    events: list[Event] = field(default_factory=list)
    sharing: Sharing = QUICK

    def __call__(
        self,
        probe: Probe,
        *,
        trials: int | None = None,
        effort: Effort = PATIENT,
        seed: int = 0,
        resume: bool = False,
        timeout_seconds: float | None = None,
        fingerprint: Mapping[str, str] = FINGERPRINT,
        predictor: Predictor | None = None,
    ) -> SearchOutcome:
        """Search."""
        return search(
            self.problem,
            probe,
            effort=effort,
            memory_limit_bytes=LIMIT_BYTES,
            seed=seed,
            trials=trials,
            timeout_seconds=timeout_seconds,
            storage=StudyStorage(self.url, "s", resume, fingerprint, self.sharing),
            listener=self.events.append,
            predictor=predictor,
        )


@dataclass
class Now:
    """A clock that stands still but for what a test adds, and for a step at each look at it."""

    seconds: float = 0.0
    step_seconds: float = 0.0

    def __call__(self) -> float:
        """Look at it."""
        self.seconds += self.step_seconds
        return self.seconds


def probed(outcome: SearchOutcome, purpose: Purpose | None = None) -> list[Record]:
    """The records that a probe was run for."""
    return [record for record in outcome.records if record.probed and purpose in (None, record.purpose)]
