"""Derives the progress of a run from its events, for the live display, and as plain lines, for logs and pipes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import assert_never

from autotune.core.candidate import Candidate
from autotune.core.events import (
    ONCE_MORE,
    CandidateVetoed,
    Event,
    Noted,
    ProbeFinished,
    ProbeLost,
    ProbeStarted,
    Ranked,
    StageStarted,
    StudyResumed,
    Tracing,
    WorkloadReady,
)
from autotune.core.measurement import Measurement
from autotune.reporting.words import (
    BASELINE_NAME,
    baseline_name,
    bytes_or_dash,
    differences,
    memory_cells,
    printable,
    rate_or_dash,
    status_text,
)
from autotune.units import counted, format_bytes, format_count, format_duration

_PURPOSES = {
    "confirmation": "confirming ",
    "comparison": "short run of ",
    "contribution": "one choice changed back: ",
    "audit": "predicted not to fit: ",
}
_SILENT_SECONDS = 30.0
UNCOUNTED = ("audit", *ONCE_MORE)
"""Purposes of probes that do not count towards the limit."""


@dataclass
class Progress:
    """The state of a run so far.

    Attributes:
        baseline: the candidate from which differences are shown.
        name: its name.
        limit: maximum number of probes, :data:`UNCOUNTED` ones excluded; None before it is known.
        done: finished probes, :data:`UNCOUNTED` ones excluded, those of a resumed study included.
        running: the probes that run, by their numbers: one for each worker of this machine.
        vetoed: candidates rejected without a probe, those of a resumed study included.
        best: the fastest candidate that fits, so far.
        seconds_left: until the time limit, when a probe last began; None: there is no limit.
        tracing: progress of traces; None when none are run.
        ranked: the last provisional ranking, or None.
    """

    baseline: Candidate = field(default_factory=lambda: Candidate({}))
    name: str = BASELINE_NAME
    limit: int | None = None
    done: int = 0
    vetoed: int = 0
    running: dict[int, ProbeStarted] = field(default_factory=dict)
    best: ProbeFinished | None = None
    seconds_left: float | None = None
    tracing: Tracing | None = None
    ranked: Ranked | None = None
    _probe_seconds: list[float] = field(default_factory=list)

    def follow(self, event: Event) -> None:
        """Update the state by an event."""
        match event:
            case StageStarted():
                self.tracing = None
            case Tracing():
                self.tracing = event
            case Ranked():
                self.ranked = event
            case WorkloadReady(baseline=baseline, own=own):
                self.baseline, self.name = baseline, baseline_name(own=own)
            case StudyResumed(probes=probes, vetoed=vetoed, trials_limit=limit, best=best_run):
                self.done, self.vetoed, self.limit, self.best = probes, vetoed, limit, best_run
            case ProbeStarted() | ProbeFinished() | ProbeLost():
                self._follow_probe(event)
            case CandidateVetoed():
                self.vetoed += 1

    def _follow_probe(self, event: ProbeStarted | ProbeFinished | ProbeLost) -> None:
        self.running.pop(event.number, None)
        match event:
            case ProbeStarted(number=number, candidate=candidate, purpose=purpose, trials_limit=limit):
                self.running[number], self.limit, self.tracing = event, limit, None
                self.seconds_left = event.seconds_left
                self.baseline = candidate if purpose == "baseline" else self.baseline
            case ProbeFinished(purpose=purpose, measurement=measurement, best=best):
                failed = purpose in ONCE_MORE and not measurement.ok
                of_best = self.best is not None and self.best.number == event.number
                self.best = event if best else None if failed and of_best else self.best
                self.done += purpose not in UNCOUNTED
                if purpose != "comparison":
                    self._probe_seconds.append(measurement.wall_seconds)

    @property
    def remaining_seconds(self) -> float | None:
        """Estimate of the time for the remaining probes, by the mean of finished ones, the workers and the time limit.

        :data:`UNCOUNTED` ones come on top. None before the first has ended, and from where only these are left.
        """
        uncounted = any(one.purpose in UNCOUNTED for one in self.running.values())
        if self.limit is None or not self._probe_seconds or self.done >= self.limit or uncounted:
            return None
        mean = sum(self._probe_seconds) / len(self._probe_seconds)
        together = (self.limit - self.done) * mean / max(1, len(self.running))
        return min(together, inf if self.seconds_left is None else self.seconds_left)

    @property
    def count_text(self) -> str:
        """How many probes have ended, and their limit, which may be lower than a resumed study has probes."""
        if self.limit is not None and self.done > self.limit:
            return f"{counted(self.done, 'probe')}, over the limit of {self.limit}"
        return f"{self.done} of at most {self.limit} probes"

    @property
    def running_lines(self) -> list[str]:
        """The running probes in words, the oldest first."""
        shown = [(number, self.candidate_text(one.candidate, one.purpose)) for number, one in self.running.items()]
        return [f"probe {number}: {text}" for number, text in shown]

    @property
    def best_text(self) -> str:
        """The best so far in words; empty when there is none."""
        if self.best is None:
            return ""
        shown = self.best.measurement
        figures = f"{rate_or_dash(shown.tokens_per_second)}, {bytes_or_dash(shown.held_bytes)}"
        return f"best so far: {differences(self.best.candidate, self.baseline, self.name)} ({figures})"

    def line(self, event: Event) -> str:
        """Return an event, which was followed, as one line; an empty text for one that only changes a display."""
        return printable(self._text(event).replace("\n", " "))

    def _text(self, event: Event) -> str:
        match event:
            case StageStarted(text=text):
                return text
            case WorkloadReady():
                return workload_text(event)
            case StudyResumed():
                return resumed_text(self)
            case Noted(text=text):
                return f"note: {text}"
            case ProbeStarted(number=number, candidate=candidate, purpose=purpose, trials_limit=limit):
                place = "" if purpose in UNCOUNTED else f" ({self.done + len(self.running)} of at most {limit})"
                return f"probe {number} started{place}: {self.candidate_text(candidate, purpose)}"
            case ProbeFinished(number=number, candidate=candidate, purpose=purpose, measurement=measurement, best=best):
                figures = f"{bytes_or_dash(measurement.held_bytes)} held, {rate_or_dash(measurement.tokens_per_second)}"
                outcome = figures if measurement.ok else reason_text(measurement)
                return (
                    f"probe {number} {status_text(measurement.status)}: {outcome}: "
                    f"{self.candidate_text(candidate, purpose)}{' (best so far)' if best else ''}"
                )
            case ProbeLost(number=number):
                return f"probe {number} lost with its worker: it is repeated"
            case CandidateVetoed(number=number, candidate=candidate, reason=reason):
                return f"candidate {number} vetoed: {reason}: {self.candidate_text(candidate, 'search')}"
            case Tracing() | Ranked():
                return ""
        assert_never(event)

    def candidate_text(self, candidate: Candidate, purpose: str) -> str:
        """Return a candidate's differences from the baseline, with the purpose of the probe where it matters."""
        shown = differences(candidate, self.baseline, self.name)
        return self.name if purpose == "baseline" else _PURPOSES.get(purpose, "") + shown

    def finished_text(self, event: ProbeFinished) -> str:
        """Return the candidate and purpose of a finished probe, for a line with its number."""
        if event.purpose in ONCE_MORE and event.candidate != self.baseline:
            return f"{_PURPOSES[event.purpose]}probe {event.number}"
        return self.candidate_text(event.candidate, event.purpose)


class PlainListener:
    """Writes one line per event: of rankings the first alone, of traces one where nothing was written for a while.

    Args:
        write: gets a line without its newline.
        clock: seconds, from any start.
    """

    def __init__(self, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._written_seconds = clock()
        self._progress = Progress()

    def __call__(self, event: Event) -> None:
        """Write the line of an event, if it has one."""
        first = self._progress.ranked is None
        self._progress.follow(event)
        line = ranked_text(event) if first and isinstance(event, Ranked) else self._progress.line(event)
        if isinstance(event, Tracing) and self._clock() - self._written_seconds >= _SILENT_SECONDS:
            line = tracing_text(event)
        if line:
            self._write(line)
            self._written_seconds = self._clock()


def tracing_text(tracing: Tracing) -> str:
    """Return the progress of traces."""
    left = tracing.remaining_seconds
    remaining = "" if left is None else f", about {format_duration(left)} left"
    return f"{tracing.done:,} of about {tracing.expected:,} traces{remaining}"


def ranked_text(ranked: Ranked) -> str:
    """Return the best candidate of a provisional ranking in one line."""
    best = ranked.best[0]
    rate, (needs, _, _) = best.tokens_per_second, memory_cells(best)
    if not best.fits:
        return f"first ranking: nothing fits yet, the least needs {needs}; the search goes on"
    figures = needs if rate is None else f"{rate_or_dash(rate)}, {needs}"
    return f"first ranking of the candidates traced so far: {differences(best.candidate, ranked.baseline)} ({figures})"


def resumed_text(progress: Progress) -> str:
    """Return the contents of a resumed study in one line."""
    vetoed = f", {progress.vetoed} vetoed" if progress.vetoed else ""
    found = progress.best_text or "nothing fits so far"
    return f"resumed with {progress.count_text}{vetoed}; {found}"


def reason_text(measurement: Measurement) -> str:
    """Return why a probe failed, in words; empty if it did not."""
    if measurement.out_of_memory is None or measurement.reason:
        return measurement.reason
    asked = measurement.out_of_memory.requested_bytes
    return f"in {measurement.out_of_memory.phase}" + (f", asking for {format_bytes(asked)}" if asked else "")


def workload_text(event: WorkloadReady) -> str:
    """Return the workload in one line."""
    model, dataset = event.workload.model, event.workload.dataset
    return (
        f"{model.architecture} ({format_count(model.parameters)} parameters) on {dataset.lengths.rows:,} rows, "
        f"{dataset.documents.tokens:,} tokens, the longest {dataset.lengths.longest:,}; "
        f"budget {format_bytes(event.budget_bytes)}, {event.candidates:,} candidates"
    )
