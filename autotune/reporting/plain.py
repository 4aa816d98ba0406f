"""Progress as plain lines, for logs and pipes: one per event, with only the first ranking and no counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from autotune.core.events import (
    CandidateVetoed,
    Event,
    ProbeFinished,
    ProbeLost,
    ProbeStarted,
    Ranked,
)
from autotune.reporting.progress import UNCOUNTED, Progress, ranked_text, reason_text
from autotune.reporting.words import bytes_or_dash, rate_or_dash, status_text


class PlainListener:
    """Writes the lines of events; ``write`` gets them without the newline."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._progress = Progress()

    def __call__(self, event: Event) -> None:
        """Write the line of an event, if it has one."""
        first = self._progress.ranked is None
        self._progress.follow(event)
        line = self._line(event, first)
        if line:
            self._write(line.replace("\n", " "))

    def _line(self, event: Event, first: bool) -> str:
        progress = self._progress
        match event:
            case Ranked():
                return ranked_text(event) if first else ""
            case ProbeStarted() | ProbeFinished() | ProbeLost() | CandidateVetoed():
                return self._line_of(event)
        return progress.line_text(event)

    def _line_of(self, event: ProbeStarted | ProbeFinished | ProbeLost | CandidateVetoed) -> str:
        """Return the line of an event about a candidate."""
        progress = self._progress
        match event:
            case ProbeStarted(number=number, candidate=candidate, purpose=purpose, trials_limit=limit):
                place = "" if purpose in UNCOUNTED else f" ({progress.done + len(progress.running)} of at most {limit})"
                return f"probe {number} started{place}: {progress.candidate_text(candidate, purpose)}"
            case ProbeFinished(number=number, candidate=candidate, purpose=purpose, measurement=measurement, best=best):
                figures = f"peak {bytes_or_dash(measurement.peak_bytes)}, {rate_or_dash(measurement.tokens_per_second)}"
                reason = reason_text(measurement)
                return (
                    f"probe {number} {status_text(measurement.status)}: {figures if measurement.ok else reason}: "
                    f"{progress.candidate_text(candidate, purpose)}{' (best so far)' if best else ''}"
                )
            case ProbeLost(number=number):
                return f"probe {number} lost with its worker: it is repeated"
            case CandidateVetoed(number=number, candidate=candidate, reason=reason):
                return f"candidate {number} vetoed: {reason}: {progress.candidate_text(candidate, 'search')}"
        assert_never(event)
