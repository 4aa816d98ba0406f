"""Follows the events of a run: its state for the live display, and one plain line per event for logs and pipes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from autotune.core import events
from autotune.core.candidate import Candidate
from autotune.core.machine import Hardware
from autotune.core.measurement import Measurement
from autotune.reporting import words
from autotune.units import format_bytes, format_count, format_duration, plural

_PURPOSES = {
    "confirmation": "confirming ",
    "comparison": "short run of ",
}
_SILENT_SECONDS = 30.0


@dataclass
class Progress:
    """The state of a run so far.

    Attributes:
        baseline: the candidate from which differences are shown.
        name: its name.
        limit: maximum number of probes, confirmations and short runs excluded; None before it is known.
        done: finished probes, confirmations and short runs excluded, those of a resumed study included.
        running: the running probe, or None.
        vetoed: candidates rejected without a probe, those of a resumed study included.
        best: the fastest candidate that fits, so far.
        tracing: progress of traces; None if none run.
        ranked: the last provisional ranking, or None.
    """

    baseline: Candidate = field(default_factory=lambda: Candidate({}))
    name: str = words.BASELINE_NAME
    limit: int | None = None
    done: int = 0
    vetoed: int = 0
    running: events.ProbeStarted | None = None
    best: events.ProbeFinished | None = None
    tracing: events.Tracing | None = None
    ranked: events.Ranked | None = None

    def follow(self, event: events.Event) -> None:
        """Update the state by an event."""
        match event:
            case events.StageStarted():
                self.tracing = None
            case events.Tracing():
                self.tracing = event
            case events.Ranked():
                self.ranked = event
            case events.WorkloadReady(baseline=baseline, own=own):
                self.baseline, self.name = baseline, words.baseline_name(is_users=own)
            case events.StudyResumed(probes=probes, vetoed=vetoed, trials_limit=limit, best=best_run):
                self.done, self.vetoed, self.limit, self.best = probes, vetoed, limit, best_run
            case events.ProbeStarted(candidate=candidate, purpose=purpose, trials_limit=limit):
                self.running, self.limit, self.tracing = event, limit, None
                self.baseline = candidate if purpose == "baseline" else self.baseline
            case events.ProbeFinished():
                self._follow_end(event)
            case events.CandidateVetoed():
                self.vetoed += 1

    def _follow_end(self, event: events.ProbeFinished) -> None:
        # It may be of another worker of the study.
        if self.running is not None and self.running.number == event.number:
            self.running = None
        failed = event.purpose in events.REPEATED and not event.measurement.ok
        of_best = self.best is not None and self.best.number == event.number
        self.best = event if event.best else None if failed and of_best else self.best
        self.done += event.purpose not in events.REPEATED

    @property
    def count_text(self) -> str:
        """Number of finished probes with their limit, which a resumed study may exceed, and of vetoed candidates."""
        vetoed = f", {self.vetoed} vetoed" if self.vetoed else ""
        if self.limit is not None and self.done > self.limit:
            return f"{plural(self.done, 'probe')}, over the limit of {self.limit}{vetoed}"
        return f"{self.done} of at most {plural(self.limit or 0, 'probe')}{vetoed}"

    @property
    def running_text(self) -> str:
        """The running probe; empty without one."""
        one = self.running
        return f"probe {one.number}: {self.candidate_text(one.candidate, one.purpose)}" if one is not None else ""

    @property
    def best_text(self) -> str:
        """The best candidate so far with its figures; empty without one."""
        if self.best is None:
            return ""
        shown = self.best.measurement
        figures = f"{words.rate_or_dash(shown.tokens_per_second)}, {words.bytes_or_dash(shown.used_bytes)}"
        return f"best so far: {words.differences(self.best.candidate, self.baseline, self.name)} ({figures})"

    def line(self, event: events.Event) -> str:
        """Return an event as one line, after :meth:`follow`; empty if it only changes the live display."""
        return words.printable(self._text(event).replace("\n", " "))

    def _text(self, event: events.Event) -> str:
        match event:
            case events.StageStarted(text=text):
                return text
            case events.WorkloadReady():
                return workload_text(event)
            case events.StudyResumed():
                return f"resumed with {self.count_text}; {self.best_text or 'nothing fits so far'}"
            case events.Noted(text=text):
                return f"note: {text}"
            case events.ProbeStarted(number=number, candidate=candidate, purpose=purpose, trials_limit=limit):
                place = "" if purpose in events.REPEATED else f" ({self.done + 1} of at most {limit})"
                return f"probe {number} started{place}: {self.candidate_text(candidate, purpose)}"
            case events.ProbeFinished(number=number, measurement=shown):
                figures = f"{words.bytes_or_dash(shown.used_bytes)}, {words.rate_or_dash(shown.tokens_per_second)}"
                what = f"{self.candidate_text(event.candidate, event.purpose)}{' (best so far)' if event.best else ''}"
                outcome = figures if shown.ok else reason_text(shown)
                return f"probe {number} {words.status_text(shown.status)}: {outcome}: {what}"
            case events.CandidateVetoed(number=number, candidate=candidate, reason=reason):
                return f"candidate {number} vetoed: {reason}: {self.candidate_text(candidate, 'search')}"
            case events.Tracing() | events.Ranked():
                return ""
        assert_never(event)

    def candidate_text(self, candidate: Candidate, purpose: str) -> str:
        """Return a candidate's differences from the baseline, or a contribution's from the best, with the purpose."""
        if purpose == "baseline":
            return self.name
        if purpose == "contribution" and self.best is not None and self.best.candidate != candidate:
            return f"the best so far with {words.differences(candidate, self.best.candidate)}"
        return _PURPOSES.get(purpose, "") + words.differences(candidate, self.baseline, self.name)

    def finished_text(self, event: events.ProbeFinished) -> str:
        """Return the candidate and purpose of a finished probe, for a line with its number."""
        if event.purpose in events.REPEATED and event.candidate != self.baseline:
            return f"{_PURPOSES[event.purpose]}probe {event.number}"
        return self.candidate_text(event.candidate, event.purpose)


class PlainListener:
    """Writes one line per event; of rankings only the first, of traces one after 30 s without a line.

    Args:
        write: gets a line without its newline.
        note: gets the lines of notes; None: ``write``.
        clock: seconds, from any start.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        note: Callable[[str], object] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._note = note or write
        self._clock = clock
        self._written_seconds = clock()
        self._progress = Progress()

    def __call__(self, event: events.Event) -> None:
        """Write the line of an event, if it has one."""
        first = self._progress.ranked is None
        self._progress.follow(event)
        line = ranked_text(event) if first and isinstance(event, events.Ranked) else self._progress.line(event)
        if isinstance(event, events.Tracing) and self._clock() - self._written_seconds >= _SILENT_SECONDS:
            line = tracing_text(event)
        if line:
            (self._note if isinstance(event, events.Noted) else self._write)(line)
            self._written_seconds = self._clock()


def tracing_text(tracing: events.Tracing) -> str:
    """Return the progress of traces."""
    left = tracing.remaining_seconds
    remaining = "" if left is None else f", about {format_duration(left)} left"
    return f"{tracing.done:,} of about {plural(tracing.expected, 'trace')}{remaining}"


def ranked_text(ranked: events.Ranked) -> str:
    """Return the best candidate of a provisional ranking in one line."""
    best = ranked.best[0]
    rate, (needs, _, _) = best.tokens_per_second, words.memory_cells(best)
    if not best.fits:
        return f"first ranking: nothing fits yet, the least needs {needs}; the search goes on"
    figures = needs if rate is None else f"{words.predicted_rate(best, words.rate_or_dash(rate))}, {needs}"
    choices = words.differences(best.candidate, ranked.baseline)
    return f"first ranking of the candidates traced so far: {choices} ({figures})"


def reason_text(measurement: Measurement) -> str:
    """Return why a probe failed; empty if it did not."""
    if measurement.out_of_memory is None or measurement.reason:
        return measurement.reason
    asked = measurement.out_of_memory.requested_bytes
    return f"in {measurement.out_of_memory.phase}" + (f", asking for {format_bytes(asked)}" if asked else "")


def workload_text(event: events.WorkloadReady) -> str:
    """Return the workload in one line."""
    model, dataset = event.workload.model, event.workload.dataset
    rows = plural(dataset.lengths.rows, "row")
    return (
        f"{model.architecture} ({format_count(model.parameters)} parameters) on {rows}, "
        f"{dataset.documents.tokens:,} tokens, the longest {dataset.lengths.longest:,}; "
        f"budget {format_bytes(event.budget_bytes)} {_device_text(event.hardware)}, "
        f"{plural(event.candidates, 'candidate')}"
    )


def _device_text(hardware: Hardware) -> str:
    name = f"a CPU ({hardware.name})" if hardware.kind == "cpu" else hardware.name
    return f"for each of {hardware.processes} processes on {name}" if hardware.processes > 1 else f"on {name}"
