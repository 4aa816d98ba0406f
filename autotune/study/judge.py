"""Decides which candidates need no probe: known already, illegal, implied by another, or predicted not to fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.core.candidate import Candidate, Choice
from autotune.core.prediction import NoPredictor, Prediction, Predictor
from autotune.core.status import ProbeStatus
from autotune.study.problem import Problem, Record

_RAN_OUT = {
    ProbeStatus.OUT_OF_MEMORY: "ran out of memory",
    ProbeStatus.HOST_OUT_OF_MEMORY: "ran out of host memory",
}


@dataclass(frozen=True)
class Veto:
    """Why a candidate is not worth a probe.

    Attributes:
        reason: the reason in words.
        prediction: the prediction that decided, or None if another reason did.
    """

    reason: str
    prediction: Prediction | None = None


class Judge:
    """Keeps the records of candidates and vetoes candidates from them; every candidate is given in its normal form."""

    def __init__(self, problem: Problem, predictor: Predictor | None = None, memory_limit_bytes: int = 0) -> None:
        self._problem = problem
        self._predictor = predictor or NoPredictor()
        self._memory_limit_bytes = memory_limit_bytes
        self._illegal: dict[Candidate, str | None] = {}
        self._by_candidate: dict[Candidate, Record] = {}
        self._by_identity: dict[str, Record] = {}
        self._ran_out: dict[int, Record] = {}
        self._elsewhere: frozenset[Candidate] = frozenset()
        self._plans_elsewhere: frozenset[str] = frozenset()

    def learn(self, record: Record) -> None:
        """Store a record, so that its candidate and all candidates with the same plan are known."""
        before = self._by_candidate.get(record.candidate)
        # A veto by one worker may come after the probe of another.
        if before is None or record.probed or not before.probed:
            self._by_candidate[record.candidate] = record
        # Only a legal or a probed candidate has a plan that other candidates may share.
        if record.probed or self.illegal(record.candidate) is None:
            plan = self._problem.identity(record.candidate)
            before = self._by_identity.get(plan)
            if before is None or record.probed or not before.probed:
                self._by_identity[plan] = record
        if record.measurement.status in _RAN_OUT:
            self._ran_out[record.number] = record

    def illegal(self, candidate: Candidate) -> str | None:
        """Return why a candidate must not be recommended, or None when it may."""
        if candidate not in self._illegal:
            self._illegal[candidate] = self._problem.illegal(candidate)
        return self._illegal[candidate]

    def known(self, candidate: Candidate) -> Record | None:
        """Return the record of this candidate or of one with the same plan, or None."""
        if candidate in self._by_candidate:
            return self._by_candidate[candidate]
        if self.illegal(candidate) is not None:
            return None
        return self._by_identity.get(self._problem.identity(candidate))

    def look_elsewhere(self, candidates: Iterable[Candidate]) -> None:
        """Take note of the candidates that other workers probe at this moment, in place of those before."""
        self._elsewhere = frozenset(candidates)
        self._plans_elsewhere = frozenset(map(self._problem.identity, self._elsewhere))

    def is_open(self, candidate: Candidate) -> bool:
        """Whether a candidate was neither probed nor vetoed so far, and no other worker probes its plan."""
        if self.known(candidate) is not None or candidate in self._elsewhere:
            return False
        return self.illegal(candidate) is not None or self._problem.identity(candidate) not in self._plans_elsewhere

    def veto(self, candidate: Candidate) -> Veto | None:
        """Return why a candidate is not worth a probe, by what is known now, or None when it is."""
        reason = self.illegal(candidate) or self._implied(candidate)
        return Veto(reason) if reason is not None else self._predicted(self._predictor.predict(candidate))

    def verdict(self, candidate: Candidate) -> Veto | None:
        """Return why a candidate is not worth a probe, or None when it is; called right before it would be probed.

        If the candidate probably does not fit, a more certain prediction is requested, if that costs less than a probe.
        """
        veto = self.veto(candidate)
        guess = self._predictor.predict(candidate)
        if veto is None and guess is not None and not guess.certain and guess.need_bytes > self._memory_limit_bytes:
            return self._predicted(self._predictor.make_sure(candidate))
        return veto

    def eligible(self, record: Record) -> bool:
        """Whether a record may be recommended: it is legal and ran to the end."""
        return record.measurement.ok and self.illegal(record.candidate) is None

    def _predicted(self, prediction: Prediction | None) -> Veto | None:
        limit_bytes = self._memory_limit_bytes
        if prediction is None or not prediction.certain or not prediction.over(limit_bytes):
            return None
        return Veto(prediction.said(limit_bytes), prediction)

    def _implied(self, candidate: Candidate) -> str | None:
        for record in self._ran_out.values():
            ended = _RAN_OUT[record.measurement.status]
            lacked = record.measurement.out_of_memory
            differing = _differing(candidate, record.candidate)
            if not differing:
                continue
            if lacked is not None:
                without = [knob for knob in differing if self._problem.only_in.get(knob, lacked.phase) == lacked.phase]
                if not without:
                    beside = ", ".join(f"{knob}={candidate[knob]}" for knob in differing)
                    return f"trial {record.number} {ended} in {lacked.phase}, where {beside} makes no difference"
                differing = without
            if all(_larger(candidate, record.candidate, knob, self._problem.ordered) for knob in differing):
                changes = ", ".join(f"{knob} {record.candidate[knob]} → {candidate[knob]}" for knob in differing)
                return f"trial {record.number} {ended}, and this never needs less: {changes}, all else equal"
        return None


def _differing(candidate: Candidate, other: Candidate) -> list[str]:
    return [knob for knob in candidate if candidate[knob] != other.get(knob)]


def _larger(candidate: Candidate, other: Candidate, knob: str, ordered: frozenset[str]) -> bool:
    """Whether a knob's choice never needs less memory than another candidate's, all else equal.

    Only integers are compared: the order does not cover choices such as ``off`` or ``none``.
    """
    return knob in ordered and _exceeds(candidate[knob], other.get(knob))


def _exceeds(choice: Choice, other: Choice | None) -> bool:
    return isinstance(choice, int) and isinstance(other, int) and choice > other
