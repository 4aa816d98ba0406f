"""Infers failures of candidates from those that ran out of memory or time."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.core.candidate import Candidate, Choice
from autotune.core.status import ProbeStatus
from autotune.study.problem import Problem, Record

_RAN_OUT = {
    ProbeStatus.OUT_OF_MEMORY: "ran out of memory",
    ProbeStatus.HOST_OUT_OF_MEMORY: "ran out of host memory",
}


class Failures:
    """The candidates that ran out of memory or of time.

    Attributes:
        surprised: whether a candidate that was expected to fit ran out of device memory.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        # Records with the run that failed, their probe or a later one, by number.
        self._failed: dict[int, Record] = {}
        self._trained: list[Candidate] = []
        self.surprised = False

    def learn(self, run: Record, *, expected_to_fit: bool) -> None:
        """Add a probe, or a record with a later run as its measurement.

        Args:
            expected_to_fit: whether a prediction or an earlier probe fits the limit.
        """
        status = run.measurement.status
        if status in _RAN_OUT or status is ProbeStatus.TIMEOUT:
            self._failed[run.number] = run
            self.surprised |= status is ProbeStatus.OUT_OF_MEMORY and expected_to_fit
        elif run.measurement.ok:
            self._trained.append(run.candidate)

    @property
    def of_device_memory(self) -> list[Record]:
        """The records that ran out of device memory."""
        return [run for run in self._failed.values() if run.measurement.status is ProbeStatus.OUT_OF_MEMORY]

    def is_slow(self, candidate: Candidate) -> bool:
        """Whether a probe with no larger micro-batches timed out, and none with as large ones ended ``ok``."""
        knobs = self._problem.longer
        slow = (run.candidate for run in self._failed.values() if run.measurement.status is ProbeStatus.TIMEOUT)
        return any(_as_large(candidate, other, knobs) for other in slow) and not any(
            _as_large(other, candidate, knobs) for other in self._trained
        )

    def implied(self, candidate: Candidate) -> str | None:
        """Return a description of a failure that implies failure of the candidate, or None."""
        found = (self._implied_by(run, candidate) for run in self._failed.values())
        return next((reason for reason in found if reason is not None), None)

    def _implied_by(self, run: Record, candidate: Candidate) -> str | None:
        """Return the reason that another candidate's failure implies this one's: no other choice can help; or None."""
        measurement, problem = run.measurement, self._problem
        differing = [knob for knob, choice in candidate.items() if choice != run.candidate.get(knob)]
        if not differing:
            return None
        if measurement.status is ProbeStatus.TIMEOUT:
            longer = _growth(candidate, run.candidate, differing, problem.longer)
            killed = f"trial {run.number} was {measurement.reason}"
            return longer and f"{killed}, and this never takes less time: {longer}, all else equal"
        ended = f"trial {run.number} {_RAN_OUT[measurement.status]}"
        larger = _growth(candidate, run.candidate, differing, problem.ordered)
        if larger is None or (problem.accumulates(run.candidate) and not problem.accumulates(candidate)):
            return None
        return f"{ended}, and this never needs less: {larger}, all else equal"


def _growth(candidate: Candidate, other: Candidate, knobs: Iterable[str], ordered: frozenset[str]) -> str | None:
    """Return a description of how choices exceed another candidate's; None if one does not, or its knob is not ordered.

    Only integers are compared: the order does not cover choices such as ``off`` or ``none``.
    """
    if not all(knob in ordered and _exceeds(candidate[knob], other.get(knob)) for knob in knobs):
        return None
    return ", ".join(f"{knob} {other[knob]} → {candidate[knob]}" for knob in knobs)


def _as_large(candidate: Candidate, other: Candidate, knobs: frozenset[str]) -> bool:
    """Whether no choice of these knobs is smaller than another candidate's."""
    return not any(_exceeds(other[knob], candidate.get(knob)) for knob in knobs if knob in other)


def _exceeds(choice: Choice, other: Choice | None) -> bool:
    return isinstance(choice, int) and isinstance(other, int) and choice > other
