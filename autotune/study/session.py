"""What the parts of a running search share: the records, the clock, and how a candidate is probed."""

from __future__ import annotations

from statistics import fmean

from autotune.core.candidate import Candidate
from autotune.core.effort import Effort
from autotune.core.events import CandidateVetoed, Listener, Noted, ProbeFinished, ProbeStarted
from autotune.core.measurement import Measurement
from autotune.core.status import ProbeStatus
from autotune.study.clock import Clock
from autotune.study.judge import Judge, Veto
from autotune.study.ledger import Ledger
from autotune.study.prediction import Predictor
from autotune.study.problem import Probe, Problem, Purpose, Record
from autotune.study.selection import leader

_MAX_CONFIRMED = 3
"""Candidates that pass the longer run before the best of them is taken as it is."""


class Session:
    """One run of a search.

    Attributes:
        baseline_candidate: the baseline in its normal form.
        trials: probes at the most, those of earlier runs included, audits and confirmations excluded.
        predictor: is told every probe.
        cut_off: what the time limit left unfinished; the study does not hold it, so that a resumed run repeats it.
    """

    def __init__(
        self,
        problem: Problem,
        probe: Probe,
        ledger: Ledger,
        effort: Effort,
        trials: int,
        clock: Clock,
        listener: Listener,
        predictor: Predictor,
    ) -> None:
        self.problem = problem
        self.ledger = ledger
        self.effort = effort
        self.trials = trials
        self.clock = clock
        self.predictor = predictor
        self.judge = Judge(problem, predictor, ledger.memory_limit_bytes)
        self.cut_off: list[Record] = []
        self._probe = probe
        self._listener = listener
        self._passed = 0
        self.baseline_candidate = problem.normal(problem.baseline)
        for record in ledger.records:
            self._learn(record)

    @property
    def probes_left(self) -> int:
        """Probes that the trial limit still allows."""
        return self.trials - sum(
            record.probed and record.purpose is not Purpose.AUDIT for record in self.ledger.records
        )

    @property
    def baseline(self) -> Record | None:
        """The baseline's record, or None before it was reached."""
        records = (*self.ledger.records, *self.cut_off)
        return next((record for record in records if record.candidate == self.baseline_candidate), None)

    def leader(self) -> Record | None:
        """Return the record to recommend as things stand."""
        return leader(self.ledger.records, self.judge, confirm_more=self._passed < _MAX_CONFIRMED)

    def probe_seconds(self) -> float:
        """Return how long a probe that fits takes, by those so far; 0 before the first."""
        walls = [record.measurement.wall_seconds for record in self.ledger.records if record.measurement.ok]
        return fmean(walls) if walls else 0.0

    def confirmation_seconds(self) -> float:
        """Return how long the confirmation of the winner and of the baseline may take, by the probes so far."""
        longer = self.effort.confirmation.max_seconds - self.effort.probe.max_seconds
        return 2 * (self.probe_seconds() + longer) if self.probe_seconds() else 0.0

    def probe(self, candidate: Candidate, purpose: Purpose, reserve_seconds: float = 0.0) -> None:
        """Probe a candidate and record what it showed; ``reserve_seconds`` of what time is left are not for it."""
        trial = self.ledger.start(candidate, purpose, self.predictor.predict(candidate))
        measurement = self._run(trial.number, candidate, purpose, reserve_seconds)
        record = Record(trial.number, candidate, purpose, measurement)
        if self._was_cut_off(record.number, measurement, reserve_seconds):
            self.cut_off.append(record)
        else:
            record = self.ledger.finish(trial, measurement)
            self._learn(record)
        self._finished(record, purpose, measurement)

    def confirm(self, record: Record) -> None:
        """Run a record's candidate again, longer, and record what that showed."""
        measurement = self._run(record.number, record.candidate, Purpose.CONFIRMATION)
        if not self._was_cut_off(record.number, measurement):
            self.ledger.confirm(record.number, measurement)
            self._passed += measurement.ok and record.candidate != self.baseline_candidate
        self._finished(record, Purpose.CONFIRMATION, measurement)

    def _run(self, number: int, candidate: Candidate, purpose: Purpose, reserve_seconds: float = 0.0) -> Measurement:
        schedule = self.effort.confirmation if purpose is Purpose.CONFIRMATION else self.effort.probe
        self._listener(ProbeStarted(number, candidate, purpose, self.trials))
        return self._probe(number, candidate, schedule, self.clock.left(reserve_seconds))

    def _was_cut_off(self, number: int, measurement: Measurement, reserve_seconds: float = 0.0) -> bool:
        """Whether the search's time limit ended a probe: that says nothing about the candidate."""
        cut_off = measurement.status is ProbeStatus.TIMEOUT and self.clock.over(reserve_seconds)
        if cut_off:
            self._listener(Noted(f"The time limit ended the run of trial {number}: --resume repeats it."))
        return cut_off

    def veto(self, candidate: Candidate, purpose: Purpose, veto: Veto) -> None:
        """Record a candidate that is not worth a probe."""
        record = self.ledger.veto(candidate, purpose, veto.reason, veto.prediction)
        self._learn(record)
        self._listener(CandidateVetoed(record.number, candidate, veto.reason))

    def _learn(self, record: Record) -> None:
        self.judge.learn(record)
        if record.probed:
            self.predictor.learn(record)

    def _finished(self, record: Record, purpose: Purpose, measurement: Measurement) -> None:
        first = self.leader()
        best = measurement.ok and first is not None and first.number == record.number
        self._listener(ProbeFinished(record.number, record.candidate, purpose, measurement, best))
