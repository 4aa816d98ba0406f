"""Vetoes candidates that need no probe, by failures and predictions, and selects records that may be recommended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from autotune.core.candidate import Candidate, Choice
from autotune.core.prediction import Prediction, Predictor
from autotune.core.spread import TIE
from autotune.core.status import OUT_OF_MEMORY, ProbeStatus
from autotune.reporting.words import ended_text
from autotune.study.comparison import failed, runs_after
from autotune.study.problem import Problem, Record
from autotune.units import format_bytes

MAX_DROP = 0.03
"""Relative distance of a confirmed rate below an unconfirmed one for which the latter is confirmed too, unless it is
within the prediction interval of the confirmed runs."""


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
        if status in OUT_OF_MEMORY or status is ProbeStatus.TIMEOUT:
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
        knobs = self._problem.time_ordered
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
            longer = _growth(candidate, run.candidate, differing, problem.time_ordered)
            killed = f"probe {run.number} was {measurement.reason}"
            return longer and f"{killed}, and this never takes less time: {longer}, all else equal"
        ended = f"probe {run.number} {ended_text(measurement.status)}"
        larger = _growth(candidate, run.candidate, differing, problem.memory_ordered)
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

    def exclude(self, candidate: Candidate) -> None:
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
            f"predicted to need {format_bytes(int(need))}, and probe {lowest.number}, predicted to need "
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


def fastest(records: Iterable[Record]) -> Record | None:
    """Return the record with the highest token rate or, among records that tie with it, the smallest need."""
    running = list(records)
    if not running:
        return None
    top = max(record.tokens_per_second for record in running)
    tied = [record for record in running if record.tokens_per_second * (1 + TIE) >= top]
    return min(tied, key=lambda record: (record.measurement.need_bytes or 0, -record.tokens_per_second, record.number))


def recommendable_records(records: Iterable[Record], judge: Judge) -> list[Record]:
    """Return the records that may be recommended: legal and without a failed run."""
    known = tuple(records)
    out = {record.number for record in failed(known)}
    return [record for record in known if judge.eligible(record) and record.number not in out]


def leader(records: Iterable[Record], judge: Judge, *, confirm_more: bool = True) -> Record | None:
    """Return the record to recommend so far, confirmed or not.

    A record with a failed run never leads, nor does the baseline after a failed run in turn with another record. Among
    confirmed records, those with several runs precede those with one. The fastest of them leads, unless another was
    faster in its only run than this one is expected to be in a further run (:func:`_expected_high`); an unconfirmed one
    only if ``confirm_more``.
    """
    running = recommendable_records(records, judge)
    confirmed = [record for record in running if record.confirmed]
    best = fastest(record for record in confirmed if len(record.rates) > 1) or fastest(confirmed)
    if best is None:
        return fastest(running)
    for challenger in (fastest(running) if confirm_more else None, fastest(confirmed)):
        if challenger is not None and challenger.tokens_per_second > _expected_high(best):
            return challenger
    return best


def _expected_high(record: Record) -> float:
    """Return the highest rate that is expected in a further run of a confirmed record.

    With several runs, it is the upper end of the prediction interval for a further run: a lower rate in one run of
    another candidate does not distinguish the two.
    """
    expected = record.prediction_interval
    tolerated = record.tokens_per_second * (1 + MAX_DROP)
    return tolerated if expected is None else max(tolerated, expected.high)
