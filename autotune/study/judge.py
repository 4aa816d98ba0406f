"""Vetoes candidates that need no probe, and ranks candidates by predicted memory after failures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from autotune.core.candidate import Candidate
from autotune.core.prediction import Prediction, Predictor
from autotune.core.status import OUT_OF_MEMORY
from autotune.study.comparison import runs_after
from autotune.study.failures import Failures
from autotune.study.problem import Problem, Record
from autotune.units import format_bytes

_ENOUGH = 0.5
"""Minimum share with a predicted speed among the traced candidates that may fit."""


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
    """The order of candidates: none is probed while another with a smaller value is open.

    Attributes:
        NEXT: predicted to need less memory than every candidate that ran out of memory.
        ABOVE: predicted to need at least as much as a candidate that ran out of memory.
        UNPREDICTED: its trace failed.
    """

    NEXT = 0
    ABOVE = 1
    UNPREDICTED = 2


class Judge:
    """Stores the records of candidates and vetoes candidates by them; all candidates are in their normal form.

    Attributes:
        failures: the candidates that ran out of memory or of time.
    """

    def __init__(self, problem: Problem, predictor: Predictor | None = None, memory_limit_bytes: int = 0) -> None:
        self.failures = Failures(problem)
        self._problem = problem
        self._predictor = predictor or Predictor()
        self._memory_limit_bytes = memory_limit_bytes
        self._records: dict[Candidate | str, Record] = {}
        self._learnt_later: Counter[int] = Counter()
        self._set_aside: set[Candidate] = set()
        self._untraceable: set[Candidate] = set()
        self._elsewhere: frozenset[Candidate | str] = frozenset()

    def learn(self, record: Record) -> None:
        """Store a record, so that its candidate and all candidates with the same plan are known."""
        keys = {self._plan(record.candidate)}
        if record.probed:
            # The probe of an illegal candidate is also that of a legal one with the same plan.
            keys.add(self._problem.identity(record.candidate))
        for key in keys:
            before = self._records.get(key)
            # A veto by one worker may come after the probe of another.
            if before is None or record.probed or not before.probed:
                self._records[key] = record
        guess = record.prediction
        fits = guess is not None and guess.need_bytes <= self._memory_limit_bytes
        self.failures.learn(record, expected_to_fit=fits)
        if record.probed:
            self._predictor.learn(record.candidate, record.measurement)

    def learn_later(self, records: Sequence[Record]) -> None:
        """Learn from runs after the probe that ran out of memory, each once.

        Args:
            records: all records of the study.
        """
        for record in records:
            lacked = [run for run in runs_after(record, records) if run.status in OUT_OF_MEMORY]
            for run in lacked[self._learnt_later[record.number] :]:
                self._learnt_later[record.number] += 1
                self.failures.learn(replace(record, measurement=run), expected_to_fit=True)
                self._predictor.learn(record.candidate, run)

    def set_aside(self, candidate: Candidate) -> None:
        """Count a candidate as closed in this run: the time limit ended its probe."""
        self._set_aside.add(candidate)

    @property
    def predicts_speed(self) -> bool:
        """Whether the speed of most traced candidates that may fit is predicted; if so, the fastest comes first.

        Candidates that do not fit are excluded: they have no predicted speed, and for large models they are the
        majority.
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
        """Return a candidate's priority by current predictions; before its trace, it is assumed to fit."""
        if self._predictor.predict(candidate) is None:
            return Priority.UNPREDICTED if candidate in self._untraceable else Priority.NEXT
        return Priority.NEXT if self.lighter_failure(candidate) is None else Priority.ABOVE

    def need_bytes(self, candidate: Candidate) -> float:
        """Return the predicted need of a candidate, infinite without a prediction."""
        guess = self._predictor.predict(candidate)
        return math.inf if guess is None else guess.need_bytes

    def lighter_failure(self, candidate: Candidate) -> str | None:
        """Return a description of a candidate that ran out of memory with no more predicted need than this, or None."""
        need = self.need_bytes(candidate)
        runs = self.failures.of_device_memory if need < math.inf else []
        lowest = min(runs, key=lambda run: self.need_bytes(run.candidate), default=None)
        if lowest is None or (least := self.need_bytes(lowest.candidate)) > need:
            return None
        return (
            f"predicted to need {format_bytes(int(need))}, and trial {lowest.number}, predicted to need "
            f"{format_bytes(int(least))}, ran out of memory"
        )

    def known(self, candidate: Candidate) -> Record | None:
        """Return the record of this candidate or of one with the same plan, a probed one if there is any, or None."""
        return self._records.get(self._plan(candidate))

    def _plan(self, candidate: Candidate) -> Candidate | str:
        """Return a key that is equal for candidates with the same plan; illegal candidates have their own keys."""
        return self._problem.identity(candidate) if self._problem.illegal(candidate) is None else candidate

    def set_running_elsewhere(self, candidates: Collection[Candidate]) -> None:
        """Replace the candidates that other workers probe at this moment."""
        self._elsewhere = frozenset([*candidates, *map(self._problem.identity, candidates)])

    def is_open(self, candidate: Candidate) -> bool:
        """Whether a candidate was neither probed nor vetoed so far, and no other worker probes its plan."""
        plan = self._plan(candidate)
        elsewhere = not self._elsewhere.isdisjoint((candidate, plan))
        return candidate not in self._set_aside and not elsewhere and plan not in self._records

    def veto(self, candidate: Candidate) -> Veto | None:
        """Return why a candidate is not worth a probe, without a new trace, or None if it is."""
        reason = self._problem.illegal(candidate) or self.failures.implied(candidate)
        return Veto(reason) if reason is not None else self._predicted(self._predictor.predict(candidate))

    def is_decided(self, candidate: Candidate) -> bool:
        """Whether the verdict on a candidate needs no further trace."""
        untraced = (
            self._predictor.traces and candidate not in self._untraceable and self._predictor.predict(candidate) is None
        )
        return not untraced or self.veto(candidate) is not None

    def verdict(self, candidate: Candidate) -> Veto | None:
        """Return why a candidate is not worth a probe, or None if it is; call it right before the probe.

        The candidate is traced at its own sizes, unless it has been already.
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
