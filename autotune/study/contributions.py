"""Measures the contribution of each of the winner's choices by changing only that one back to the baseline's."""

from __future__ import annotations

from autotune.core.candidate import Candidate
from autotune.core.documents.result import Contribution
from autotune.core.status import ProbeStatus
from autotune.study.judge import Judge
from autotune.study.problem import Problem, Purpose, Record
from autotune.study.session import Session

_MAX_RESERVE_SHARE = 1 / 3
"""Largest share of the time limit that is reserved for another confirmation."""


def reverted_candidates(problem: Problem, winner: Candidate, baseline: Candidate) -> dict[str, Candidate]:
    """Return, for each differing knob, the winner with that knob changed back, unless that has no effect."""
    changed = {knob: problem.normal(winner.but(**{knob: baseline[knob]})) for knob in winner.differences(baseline)}
    return {knob: candidate for knob, candidate in changed.items() if candidate != winner}


def unmeasured_reverts(session: Session, winner: Record) -> list[Candidate]:
    """Return the candidates with one choice changed back that still need a probe."""
    changed = reverted_candidates(session.problem, winner.candidate, session.baseline_candidate)
    judge = session.judge
    return [
        candidate
        for candidate in dict.fromkeys(changed.values())
        if judge.is_open(candidate) and judge.veto(candidate) is None and judge.lighter_failure(candidate) is None
    ]


def measure_contributions(session: Session, winner: Record) -> bool:
    """Probe the candidates with one choice changed back, within the limits; return whether any was probed."""
    probed = False
    for candidate in unmeasured_reverts(session, winner):
        # If changing a choice back turns out better, that candidate has to be confirmed; the winner has been.
        reserve = min(session.confirmation_seconds, (session.clock.limit_seconds or 0.0) * _MAX_RESERVE_SHARE)
        if session.probes_left <= 0 or not session.has_time(reserve):
            break
        # An earlier probe of this loop may have decided this candidate.
        judge = session.judge
        if judge.is_open(candidate) and judge.verdict(candidate) is None and judge.lighter_failure(candidate) is None:
            probed |= session.probe(candidate, Purpose.CONTRIBUTION, reserve)
    return probed


def contributions(session: Session, winner: Record, *, interrupted: bool = False) -> tuple[Contribution, ...]:
    """Return the contribution of each of the winner's choices, as far as it was measured.

    Args:
        interrupted: whether the user ended the search; otherwise a limit may have.
    """
    ended = "the search was interrupted" if interrupted else "the limit of probes or of time was reached"
    baseline = session.baseline_candidate
    changed = reverted_candidates(session.problem, winner.candidate, baseline)
    found = {knob: _contribution(session, winner, knob, baseline, other, ended) for knob, other in changed.items()}
    return tuple(contribution for contribution in found.values() if contribution is not None)


def _contribution(
    session: Session, winner: Record, knob: str, baseline: Candidate, changed: Candidate, ended: str
) -> Contribution | None:
    record = session.judge.record_for(changed)
    if record is not None and record.number == winner.number:
        return None
    choice, instead_of = winner.candidate[knob], baseline[knob]
    if record is None or not record.probed:
        reason = _reason(session.judge, changed) or ended
        return Contribution(knob, choice, instead_of, None, ProbeStatus.VETOED, reason, None, None)
    # The judge's record does not contain the runs after the probe.
    record = next((known for known in session.log.records if known.number == record.number), record)
    other, expected = record.failure or record.measurement, winner.prediction_interval
    speedup = saved = distinct = None
    if other.ok and record.tokens_per_second:
        # The probe's rate is biased by selection, so the winner's rate is that of its later runs, if there are any.
        speedup = winner.tokens_per_second / record.tokens_per_second
        distinct = None if expected is None else record.tokens_per_second not in expected
    # Short runs skip the worst micro-batch once gradients exist, so their memory is no need.
    held = [run.used_bytes for run in (winner.measurement, winner.confirmation) if run is not None and run.used_bytes]
    if other.ok and held and other.used_bytes is not None:
        saved = other.used_bytes - min(max(other.used_bytes, min(held)), max(held))
    return Contribution(knob, choice, instead_of, record.number, other.status, other.reason, speedup, saved, distinct)


def _reason(judge: Judge, changed: Candidate) -> str:
    """Return why a candidate was not probed; an empty text if the search ended before."""
    veto, record = judge.veto(changed), judge.record_for(changed)
    if veto is not None:
        return veto.reason
    if record is not None:
        return record.measurement.reason
    return judge.lighter_failure(changed) or ""
