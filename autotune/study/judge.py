"""Decides which candidates need no probe, and which have to wait for others that are predicted to need less memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from autotune.core.candidate import Candidate, Choice
from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction, Predictor
from autotune.core.status import ProbeStatus
from autotune.study.problem import Problem, Record
from autotune.units import format_bytes

_RAN_OUT = {
    ProbeStatus.OUT_OF_MEMORY: "ran out of memory",
    ProbeStatus.HOST_OUT_OF_MEMORY: "ran out of host memory",
}


_ENOUGH = 0.5
"""Share of the traced candidates that may fit whose speed has to be predicted."""


@dataclass(frozen=True)
class Veto:
    """Why a candidate is not worth a probe.

    Attributes:
        reason: the reason in words.
        prediction: the prediction that decided, or None if another reason did.
    """

    reason: str
    prediction: Prediction | None = None


class Priority(IntEnum):
    """When a candidate's turn comes: no candidate is probed while another with a smaller priority is open.

    Attributes:
        NEXT: predicted to need less memory than every candidate that ran out of it.
        ABOVE: predicted to need as much as one that ran out, or more.
        UNPREDICTED: its trace failed.
    """

    NEXT = 0
    ABOVE = 1
    UNPREDICTED = 2


class Judge:
    """Keeps the records of candidates and vetoes candidates from them; every candidate is given in its normal form."""

    def __init__(self, problem: Problem, predictor: Predictor | None = None, memory_limit_bytes: int = 0) -> None:
        self._problem = problem
        self._predictor = predictor or Predictor()
        self._memory_limit_bytes = memory_limit_bytes
        self._by_candidate: dict[Candidate, Record] = {}
        self._by_identity: dict[str, Record] = {}
        # Records with the run that ran out of memory, their probe or a later one, by number; and the numbers of those
        # that were expected to fit, by a prediction or since their probe did.
        self._ran_out: dict[int, Record] = {}
        self._expected_to_fit: set[int] = set()
        self._too_long: dict[int, Record] = {}
        self._set_aside: set[Candidate] = set()
        self._untraceable: set[Candidate] = set()
        self._elsewhere: frozenset[Candidate] = frozenset()
        self._plans_elsewhere: frozenset[str] = frozenset()

    def learn(self, record: Record) -> None:
        """Store a record, so that its candidate and all candidates with the same plan are known."""
        before = self._by_candidate.get(record.candidate)
        # A veto by one worker may come after the probe of another.
        if before is None or record.probed or not before.probed:
            self._by_candidate[record.candidate] = record
        # Only a legal or a probed candidate has a plan that other candidates may share.
        if record.probed or self._problem.illegal(record.candidate) is None:
            plan = self._problem.identity(record.candidate)
            before = self._by_identity.get(plan)
            if before is None or record.probed or not before.probed:
                self._by_identity[plan] = record
        if record.measurement.status is ProbeStatus.TIMEOUT:
            self._too_long[record.number] = record
        guess = record.prediction
        fits = guess is not None and guess.need_bytes <= self._memory_limit_bytes
        self._record_out_of_memory(record, expected_to_fit=fits)

    def learn_later(self, record: Record, run: Measurement) -> None:
        """Use a run of a record's candidate after its probe."""
        self._record_out_of_memory(replace(record, measurement=run), expected_to_fit=True)

    def _record_out_of_memory(self, run: Record, *, expected_to_fit: bool) -> None:
        if run.measurement.status in _RAN_OUT:
            self._ran_out[run.number] = run
            if expected_to_fit:
                self._expected_to_fit.add(run.number)

    def set_aside(self, candidate: Candidate) -> None:
        """Count a candidate as no longer open in this run: the time limit ended its probe."""
        self._set_aside.add(candidate)

    @property
    def surprised(self) -> bool:
        """Whether a candidate ran out of device memory that was expected to fit."""
        return any(run.number in self._expected_to_fit for run in self._of_device())

    @property
    def lacked_memory(self) -> bool:
        """Whether any candidate ran out of device memory."""
        return bool(self._of_device())

    @property
    def predicts_speed(self) -> bool:
        """Whether the speed of most traced candidates that may fit is predicted: the fastest of them comes first then.

        What does not fit has no predicted speed, and in a large model's space most traced candidates do not.
        """
        guesses = [self._predictor.predict(candidate) for candidate in self._predictor.traced()]
        fitting = [guess for guess in guesses if guess is None or not guess.over(self._memory_limit_bytes)]
        speeds = sum(guess is not None and guess.tokens_per_second is not None for guess in fitting)
        return speeds > 0 and speeds >= _ENOUGH * len(fitting)

    @property
    def expects_a_fit(self) -> bool:
        """Whether an open candidate that was traced is predicted to fit."""
        traced = self._predictor.traced()
        open_ones = (each for each in traced if self.is_open(each) and self.veto(each) is None)
        return any(self.need_bytes(each) <= self._memory_limit_bytes for each in open_ones)

    def priority(self, candidate: Candidate) -> Priority:
        """Return when a candidate's turn comes, by what is predicted now; before its trace, as if it were to fit."""
        if self._predictor.predict(candidate) is None:
            return Priority.UNPREDICTED if candidate in self._untraceable else Priority.NEXT
        return Priority.NEXT if self.lighter_failure(candidate) is None else Priority.ABOVE

    def need_bytes(self, candidate: Candidate) -> float:
        """Return the predicted need of a candidate, infinite for one that is not predicted."""
        guess = self._predictor.predict(candidate)
        return math.inf if guess is None else guess.need_bytes

    def lighter_failure(self, candidate: Candidate) -> str | None:
        """Return which candidate ran out of memory that is predicted to need no more than this one, or None."""
        need = self.need_bytes(candidate)
        runs = self._of_device() if need < math.inf else []
        lowest = min(runs, key=lambda run: self.need_bytes(run.candidate), default=None)
        if lowest is None or (least := self.need_bytes(lowest.candidate)) > need:
            return None
        return (
            f"predicted to need {format_bytes(int(need))}, and trial {lowest.number}, predicted to need "
            f"{format_bytes(int(least))}, ran out of memory"
        )

    def _of_device(self) -> list[Record]:
        return [run for run in self._ran_out.values() if run.measurement.status is ProbeStatus.OUT_OF_MEMORY]

    def known(self, candidate: Candidate) -> Record | None:
        """Return the record of this candidate or of one with the same plan, a probed one if there is any, or None."""
        own = self._by_candidate.get(candidate)
        if own is not None and own.probed:
            return own
        plan = self._plan(candidate)
        return own if plan is None else self._by_identity.get(plan, own)

    def _plan(self, candidate: Candidate) -> str | None:
        """Return what is equal for candidates with the same plan; None for an illegal one, which shares no other's."""
        return self._problem.identity(candidate) if self._problem.illegal(candidate) is None else None

    def set_running_elsewhere(self, candidates: Iterable[Candidate]) -> None:
        """Replace the candidates that other workers probe at this moment."""
        self._elsewhere = frozenset(candidates)
        self._plans_elsewhere = frozenset(map(self._problem.identity, self._elsewhere))

    def is_open(self, candidate: Candidate) -> bool:
        """Whether a candidate was neither probed nor vetoed so far, and no other worker probes its plan.

        A veto by a prediction ends when the candidate is predicted to fit.
        """
        if candidate in self._elsewhere or candidate in self._set_aside:
            return False
        record = self.known(candidate)
        if record is not None and (record.probed or record.prediction is None or not self._may_fit(candidate)):
            return False
        return self._plan(candidate) not in self._plans_elsewhere

    def _may_fit(self, candidate: Candidate) -> bool:
        guess = self._predictor.predict(candidate)
        return guess is not None and not guess.over(self._memory_limit_bytes)

    def veto(self, candidate: Candidate) -> Veto | None:
        """Return why a candidate is not worth a probe, by what is known now, or None when it is."""
        reason = self._problem.illegal(candidate) or self._implied(candidate) or self._takes_longer(candidate)
        return Veto(reason) if reason is not None else self._predicted(self._predictor.predict(candidate))

    def is_slow(self, candidate: Candidate) -> bool:
        """Whether micro-batches as large took too long for a probe with other choices, and none as large ended."""
        known, knobs = self._by_candidate.values(), self._problem.longer
        too_long = any(_as_large(candidate, run.candidate, knobs) for run in self._too_long.values())
        return too_long and not any(
            record.measurement.ok and _as_large(record.candidate, candidate, knobs) for record in known
        )

    def is_decided(self, candidate: Candidate) -> bool:
        """Whether the verdict on a candidate needs no further trace."""
        untraced = (
            self._predictor.traces and candidate not in self._untraceable and self._predictor.predict(candidate) is None
        )
        return not untraced or self.veto(candidate) is not None

    def verdict(self, candidate: Candidate) -> Veto | None:
        """Return why a candidate is not worth a probe, or None when it is; called right before it would be probed.

        The candidate is traced at its own sizes, unless that was done.
        """
        if self.is_decided(candidate):
            return self.veto(candidate)
        prediction = self._predictor.trace(candidate)
        if prediction is None:
            self._untraceable.add(candidate)
        return self._predicted(prediction)

    def eligible(self, record: Record) -> bool:
        """Whether a record may be recommended: it is legal and ran to the end."""
        return record.measurement.ok and self._problem.illegal(record.candidate) is None

    def _predicted(self, prediction: Prediction | None) -> Veto | None:
        limit_bytes = self._memory_limit_bytes
        if prediction is None or not prediction.over(limit_bytes):
            return None
        return Veto(prediction.reason(limit_bytes), prediction)

    def _implied(self, candidate: Candidate) -> str | None:
        for run in self._ran_out.values():
            ended = _RAN_OUT[run.measurement.status]
            lacked = run.measurement.out_of_memory
            differing = _differing(candidate, run.candidate)
            if not differing:
                continue
            if lacked is not None:
                without = [knob for knob in differing if self._problem.only_in.get(knob, lacked.phase) == lacked.phase]
                if not without:
                    changes = ", ".join(f"{knob}={candidate[knob]}" for knob in differing)
                    return f"trial {run.number} {ended} in {lacked.phase}, where {changes} makes no difference"
                differing = without
            growth = _growth(candidate, run.candidate, differing, self._problem.ordered)
            if growth is not None:
                return f"trial {run.number} {ended}, and this never needs less: {growth}, all else equal"
        return None

    def _takes_longer(self, candidate: Candidate) -> str | None:
        for run in self._too_long.values():
            differing = _differing(candidate, run.candidate)
            growth = _growth(candidate, run.candidate, differing, self._problem.longer)
            if differing and growth is not None:
                killed = run.measurement.reason
                return f"trial {run.number} was {killed}, and this never takes less time: {growth}, all else equal"
        return None


def _differing(candidate: Candidate, other: Candidate) -> list[str]:
    return [knob for knob in candidate if candidate[knob] != other.get(knob)]


def _growth(candidate: Candidate, other: Candidate, knobs: Sequence[str], ordered: frozenset[str]) -> str | None:
    """Return how choices are larger than another candidate's, in words; None if one is not, or its knob not ordered.

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
