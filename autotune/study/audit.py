"""Checks whether predictions veto candidates that would fit, by probing a few of the vetoed ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotune.core.candidate import Candidate
from autotune.study.problem import Purpose, Record
from autotune.study.proposals import Proposer
from autotune.study.session import Session


def audit(session: Session, proposer: Proposer) -> None:
    """Probe as many vetoed candidates as the effort asks for; audits of earlier runs of the study count.

    If nothing fits so far, the candidate with the smallest predicted need is probed even if it is vetoed, so that the
    conclusion does not rest on predictions alone.
    """
    known = (*session.log.records, *session.cut_off)
    done = {record.candidate for record in known if record.purpose is Purpose.AUDIT}
    left = session.effort.audits - len(done)
    smallest = None if session.leader() else session.predictor.least()
    untried = smallest is not None and smallest not in {record.candidate for record in known if record.probed}
    if left <= 0 and not untried:
        return
    recorded = [record.candidate for record in session.log.records if not record.probed]
    nearest = (smallest,) if smallest is not None and untried else ()
    needs = _needs(session, (*nearest, *recorded, *(proposer.by_chance() if left > 0 else ())))
    waiting = sorted((candidate for candidate in needs if candidate not in done), key=needs.__getitem__)
    first = [candidate for candidate in nearest if candidate in needs]
    for candidate in dict.fromkeys((*first, *_spread(waiting, left))):
        reserve_seconds = session.settling_seconds()
        if not session.durations.has_time(reserve_seconds):
            return
        # The audit before may have corrected its prediction.
        if _needs(session, (candidate,)):
            session.probe(candidate, Purpose.AUDIT, reserve_seconds)


def contradicted(records: Iterable[Record], memory_limit_bytes: int) -> tuple[Record, ...]:
    """Return the audited candidates that ran although they were predicted not to fit."""
    audited = (record for record in records if record.purpose is Purpose.AUDIT and record.measurement.ok)
    return tuple(each for each in audited if each.prediction is not None and each.prediction.over(memory_limit_bytes))


def _needs(session: Session, candidates: Iterable[Candidate]) -> dict[Candidate, int]:
    """Return the predicted need, in bytes, of the candidates that are vetoed because of it."""
    vetoes = {candidate: session.judge.veto(candidate) for candidate in candidates}
    return {
        candidate: veto.prediction.need_bytes
        for candidate, veto in vetoes.items()
        if veto is not None and veto.prediction is not None
    }


def _spread(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return ``count`` evenly spaced candidates, starting with the first, which is the nearest to fitting."""
    if len(candidates) <= count:
        return list(candidates)
    return [candidates[len(candidates) * index // count] for index in range(max(0, count))]
