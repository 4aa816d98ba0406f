"""Makes the events of several workers one sequence, in which each finished or vetoed candidate is told once."""

from __future__ import annotations

import threading

from autotune.core.events import (
    ONCE_MORE,
    CandidateVetoed,
    Event,
    Listener,
    Noted,
    ProbeFinished,
    ProbeLost,
    ProbeStarted,
)


class Telling:
    """Passes the events of all workers of this machine on to one listener, one at a time, from any thread.

    A worker tells of its own probes, and of those of others as it reads them in the study. What the listener raises in
    another thread than the search's is raised there with the next event.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._told: set[object] = set()
        self._running: dict[int, int] = {}
        self._failure: Exception | None = None

    def __call__(self, event: Event) -> None:
        """Pass on an event of the first worker, unless it was told already."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._pass_on(event, 0)

    def of_another(self, worker: int, *events: Event) -> None:
        """Pass on events of a further worker, but for those that were told already or are of no use to the user."""
        with self._lock:
            if self._failure is not None:
                return
            try:
                for event in events:
                    self._pass_on(event, worker)
            except Exception as error:  # noqa: BLE001 the listener may be anybody's; its error ends the search
                self._failure = error

    def lost(self, worker: int, reason: str) -> None:
        """Tell that a worker has ended before its time, and that the probe it ran, if any, is lost."""
        with self._lock:
            lost = [number for number, runner in self._running.items() if runner == worker]
        self.of_another(worker, Noted(reason), *map(ProbeLost, lost))

    def _pass_on(self, event: Event, worker: int) -> None:
        if worker and not isinstance(event, (ProbeStarted, ProbeFinished, ProbeLost, CandidateVetoed, Noted)):
            return
        match event:
            case ProbeStarted(number=number):
                self._running[number] = worker
            case ProbeFinished(number=number) | ProbeLost(number=number):
                self._running.pop(number, None)
        mark = _mark(event)
        if mark is None or mark not in self._told:
            self._told.add(mark)
            self._listener(event)


def _mark(event: Event) -> object | None:
    """Return what is equal for events that tell the same, or None for an event that tells something each time."""
    match event:
        case ProbeFinished(number=number, purpose=purpose) if purpose not in ONCE_MORE:
            return ("finished", number)
        case CandidateVetoed(number=number):
            return ("vetoed", number)
        case Noted(text=text):
            return ("noted", text)
    return None
