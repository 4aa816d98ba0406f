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

    A worker tells of its own probes, and of those of others as it reads them in the study.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._told: set[object] = set()
        self._running: dict[int, int] = {}

    def __call__(self, event: Event, worker: int = 0) -> None:
        """Pass an event on, unless it was told already, or is a further worker's and of no use to the user.

        Args:
            worker: the number of the worker that tells it, 0 for the first.
        """
        with self._lock:
            match event:
                case ProbeStarted(number=number):
                    self._running[number] = worker
                case ProbeFinished(number=number):
                    self._running.pop(number, None)
            if worker and not isinstance(event, (ProbeStarted, ProbeFinished, CandidateVetoed, Noted)):
                return
            mark = _mark(event)
            if mark is None or mark not in self._told:
                self._told.add(mark)
                self._listener(event)

    def lost(self, worker: int, reason: str) -> None:
        """Tell that a worker has ended before its time, and that the probe it ran, if any, is lost."""
        with self._lock:
            self._listener(Noted(reason))
            for number in [number for number, runner in self._running.items() if runner == worker]:
                del self._running[number]
                self._listener(ProbeLost(number))


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
