"""Writes the results of each case to disk as soon as they are known: as JSON, and as a page of Markdown."""

from __future__ import annotations

import datetime as dt
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.core.candidate import Candidate
from autotune.core.files.codec import encode
from autotune.core.machine import Machine
from autotune.core.measurement import Measurement, Schedule
from autotune.inspection.machine import environment
from autotune.units import format_bytes
from benchmarks.gpu.accuracy import Outcome, Prediction
from benchmarks.gpu.accuracy_report import page
from benchmarks.gpu.cases import Case


class Record:
    """The outcomes of cases, written whenever something is added; for several threads.

    Args:
        file: the JSON document; the page lies beside it, with another suffix.
        schedule: of the probes.
        cases: in order, with nothing known of them yet.
    """

    def __init__(self, file: Path, machine: Machine, schedule: Schedule, cases: Sequence[Outcome]) -> None:
        self._file = file
        self._machine = machine
        self._schedule = schedule
        self._date = dt.datetime.now(tz=dt.UTC).date().isoformat()
        self._outcomes = {outcome.name: outcome for outcome in cases}
        self._operators: Mapping[str, Any] | None = None
        self._lock = threading.Lock()
        file.parent.mkdir(parents=True, exist_ok=True)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Every case, in order."""
        return tuple(self._outcomes.values())

    def described(self, name: str, choices: Candidate, limit_bytes: int, *, flat: bool) -> None:
        """Add what a case comes to on this device; see :class:`benchmarks.gpu.accuracy.Outcome`."""
        with self._lock:
            self._put(replace(self._outcomes[name], choices=choices, limit_bytes=limit_bytes, flat=flat))

    def measured(self, name: str, found: Measurement | str) -> None:
        """Add a measurement, or why there is none."""
        with self._lock:
            known = self._outcomes[name]
            if isinstance(found, str):
                self._put(replace(known, reasons={**known.reasons, "measured": found}))
            else:
                self._put(replace(known, measured=found))

    def predicted(self, name: str, kind: str, found: Prediction | str) -> None:
        """Add a prediction of a kind, or why there is none."""
        with self._lock:
            known = self._outcomes[name]
            if isinstance(found, str):
                self._put(replace(known, reasons={**known.reasons, kind: found}))
            else:
                self._put(replace(known, predictions={**known.predictions, kind: found}))

    def told(self, case: Case, kind: str, found: Prediction | str) -> None:
        """Add a prediction of a case; see :meth:`predicted`."""
        self.predicted(case.name, kind, found)

    def is_worth_timing(self, name: str) -> bool:
        """Whether a case ran to its end and was planned, so that predicted and measured times can be compared."""
        found = self._outcomes[name]
        return found.measured is not None and found.measured.ok and "planned" in found.predictions

    def operators(self, times: Mapping[str, Any] | None) -> None:
        """Write the measured times of operators, by call, next to the document."""
        if times:
            file = self._file.with_name(f"{self._file.stem}-operators.json")
            _replace(file, json.dumps(times, indent=0) + "\n")
            with self._lock:
                self._operators = times
                self._write()

    def _put(self, outcome: Outcome) -> None:
        self._outcomes[outcome.name] = outcome
        self._write()

    def _write(self) -> None:
        hardware, versions = self._machine.hardware, environment(self._machine)
        speeds = self._machine.device.speeds
        document = {
            "device": hardware.name,
            "null_gpu": hardware.is_null,
            "memory_bytes": hardware.memory_bytes,
            "launch_seconds": speeds.launch_seconds if speeds is not None else None,
            "date": self._date,
            "environment": versions,
            "schedule": encode(self._schedule),
            "cases": [encode(outcome) for outcome in self.outcomes],
        }
        versions_text = ", ".join(f"{name} {version}" for name, version in versions.items())
        schedule = self._schedule
        typical = schedule.warmup_micro_batches + schedule.min_micro_batches
        about = [
            f"`make gpu` wrote this. Cases were run in the order below, in {format_bytes(hardware.memory_bytes)}: each",
            f"two or three optimizer steps on the largest micro-batch, then {typical} or more typical micro-batches.",
            f"Installed: {versions_text}.",
        ]
        if hardware.is_null:
            about.append("It is a null GPU, whose kernels do nothing: measured times mean nothing, and are left out.")
        title = f"Predicted against measured: {'null ' * hardware.is_null}{hardware.name}, {self._date}"
        _replace(self._file, json.dumps(document, indent=1) + "\n")
        text = page(title, about, self.outcomes, self._operators, timed=not hardware.is_null)
        _replace(self._file.with_suffix(".md"), text)


def _replace(file: Path, text: str) -> None:
    """Write a file so that a reader finds the old text or the new one, whole."""
    beside = file.with_name(f".{file.name}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)
