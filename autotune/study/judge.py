"""Vetoes candidates that need no probe."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from autotune.core.candidate import Candidate
from autotune.core.prediction import Prediction, Predictor
from autotune.core.status import OUT_OF_MEMORY
from autotune.study.comparison import runs_after
from autotune.study.failures import Failures
from autotune.study.problem import Problem, Record
from autotune.units import format_bytes


@dataclass(frozen=True)
class Veto:
    """The reason that a candidate is not worth a probe.

    Attributes:
        reason: a description.
        prediction: the prediction of too much memory; None for another reason.
    """

    reason: str
    prediction: Prediction | None = None


class Judge:
    """Vetoes candidates by records and predictions; all candidates are in their normal form.

    Attributes:
        failures: the candidates that ran out of memory or of time.
    """

    def __init__(self, problem: Problem, predictor: Predictor | None = None, memory_limit_bytes: int = 0) -> None:
        self.failures = Failures(problem)
        self._problem = problem
        self._predictor = predictor or Predictor()
        self._memory_limit_bytes = memory_limit_bytes
        self._records: dict[Candidate | str, Record] = {}
        self._later_runs_learnt: Counter[int] = Counter()
        self._closed: set[Candidate] = set()
        self._running_elsewhere: frozenset[Candidate | str] = frozenset()

    def learn(self, record: Record) -> None:
        """Store a record, so that its candidate and all candidates with the same plan are known."""
        keys = {self._plan_key(record.candidate)}
        if record.probed:
            # The probe of an illegal candidate is also that of a legal one with the same plan.
            keys.add(self._problem.identity(record.candidate))
        for key in keys:
            existing = self._records.get(key)
            # A veto by one worker may come after the probe of another.
            if existing is None or record.probed or not existing.probed:
                self._records[key] = record
        prediction = record.prediction
        fits = prediction is not None and prediction.need_bytes <= self._memory_limit_bytes
        self.failures.learn(record, expected_to_fit=fits)
        if record.probed:
            self._predictor.learn(record.candidate, record.measurement)

    def learn_later(self, records: Sequence[Record]) -> None:
        """Learn from later runs that ran out of memory, from each once.

        Args:
            records: all records of the study.
        """
        for record in records:
            failed_runs = [run for run in runs_after(record, records) if run.status in OUT_OF_MEMORY]
            for run in failed_runs[self._later_runs_learnt[record.number] :]:
                self._later_runs_learnt[record.number] += 1
                self.failures.learn(replace(record, measurement=run), expected_to_fit=True)
                self._predictor.learn(record.candidate, run)

    def set_aside(self, candidate: Candidate) -> None:
        """Close a candidate for this run, because the time limit ended its probe."""
        self._closed.add(candidate)

    @property
    def predicts_speed(self) -> bool:
        """Whether the speed of a traced candidate that may fit is predicted; if so, the fastest comes first."""
        guesses = (self._predictor.predict(candidate) for candidate in self._predictor.traced())
        fitting = (guess for guess in guesses if guess is not None and not guess.over(self._memory_limit_bytes))
        return any(guess.tokens_per_second is not None for guess in fitting)

    def need_bytes(self, candidate: Candidate) -> float:
        """Return the predicted need of a candidate, infinite without a prediction."""
        prediction = self._predictor.predict(candidate)
        return math.inf if prediction is None else prediction.need_bytes

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

    def record_for(self, candidate: Candidate) -> Record | None:
        """Return the record of this candidate or of one with the same plan, a probed one if there is any, or None."""
        return self._records.get(self._plan_key(candidate))

    def _plan_key(self, candidate: Candidate) -> Candidate | str:
        """Return a key that is equal for candidates with the same plan; illegal candidates have their own keys."""
        return self._problem.identity(candidate) if self._problem.illegal(candidate) is None else candidate

    def set_running_elsewhere(self, candidates: Collection[Candidate]) -> None:
        """Replace the set of candidates that other workers are probing."""
        self._running_elsewhere = frozenset([*candidates, *map(self._problem.identity, candidates)])

    def is_open(self, candidate: Candidate, *, vetoed: bool = False) -> bool:
        """Whether a candidate was neither probed nor vetoed so far, and no other worker probes its plan.

        Args:
            vetoed: whether a vetoed candidate counts as open.
        """
        known = self.record_for(candidate)
        elsewhere = not self._running_elsewhere.isdisjoint((candidate, self._plan_key(candidate)))
        untried = known is None or (vetoed and not known.probed)
        return candidate not in self._closed and not elsewhere and untried

    def veto(self, candidate: Candidate) -> Veto | None:
        """Return the veto of a candidate, or None, without a new trace."""
        reason = self._problem.illegal(candidate) or self.failures.implied(candidate)
        return Veto(reason) if reason is not None else self._veto_by_prediction(self._predictor.predict(candidate))

    def is_decided(self, candidate: Candidate) -> bool:
        """Whether the verdict on a candidate needs no further trace."""
        traced = not self._predictor.traces or self._predictor.predict(candidate) is not None
        return traced or self.veto(candidate) is not None

    def verdict(self, candidate: Candidate) -> Veto | None:
        """Return the veto of a candidate, or None, after a trace at its own sizes; call it right before the probe."""
        if self.is_decided(candidate):
            return self.veto(candidate)
        return self._veto_by_prediction(self._predictor.trace(candidate))

    def eligible(self, record: Record) -> bool:
        """Whether a record may be recommended: it is legal, and its probe ended ``ok``."""
        return record.measurement.ok and self._problem.illegal(record.candidate) is None

    def _veto_by_prediction(self, prediction: Prediction | None) -> Veto | None:
        limit_bytes = self._memory_limit_bytes
        if prediction is None or not prediction.over(limit_bytes):
            return None
        return Veto(prediction.reason(limit_bytes), prediction)
