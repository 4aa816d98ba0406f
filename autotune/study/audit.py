"""Checks whether predictions veto candidates that would fit, by probing a few of the vetoed ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotune.core.candidate import Candidate
from autotune.study.problem import Purpose, Record
from autotune.study.proposals import Proposer
from autotune.study.session import Session


def audit(session: Session, proposer: Proposer) -> None:
    """Probe as many vetoed candidates as the effort asks for; audits of earlier runs of the study count.

    If nothing fits so far, at least the vetoed candidate with the smallest predicted need is probed, so that the
    conclusion does not rest on predictions alone.
    """
    done = [record.candidate for record in session.log.records if record.purpose is Purpose.AUDIT]
    left = max(session.effort.audits, 0 if session.leader() else 1) - len(done)
    if left <= 0:
        return
    recorded = [record.candidate for record in session.log.records if not record.probed]
    needs = _needs(session, (*recorded, *proposer.by_chance()))
    waiting = sorted((candidate for candidate in needs if candidate not in done), key=needs.__getitem__)
    for candidate in _spread(waiting, left):
        reserve_seconds = session.settling_seconds()
        if session.clock.over(reserve_seconds + session.probe_seconds()):
            return
        session.probe(candidate, Purpose.AUDIT, reserve_seconds)


def contradicted(records: Iterable[Record]) -> tuple[Record, ...]:
    """Return the records of candidates that were predicted not to fit and did."""
    return tuple(
        record for record in records if record.purpose is Purpose.AUDIT and record.measurement.ok and record.prediction
    )


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
    return [candidates[len(candidates) * index // count] for index in range(count)]
