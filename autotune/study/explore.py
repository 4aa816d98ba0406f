"""The search phase: probes the baseline, then the recipes, then proposed candidates until none is promising.

If speed is predicted, the candidates that are predicted to be the fastest take the place of the recipes.
"""

from __future__ import annotations

from autotune.core.candidate import Candidate
from autotune.study.begun import DEATHS, Unfinished
from autotune.study.contributions import unmeasured
from autotune.study.judge import Veto
from autotune.study.problem import Purpose
from autotune.study.proposals import Proposer
from autotune.study.selection import probes_without_improvement
from autotune.study.session import Session

_LARGEST_RESERVE = 1 / 2
"""Share of the time and of the trials that is reserved for contributions, confirmation and comparison."""


def explore(session: Session, proposer: Proposer) -> bool:
    """Probe candidates until the trials, the time, the patience or the candidates run out.

    Returns:
        Whether there are candidates left.
    """
    session.refresh()
    first, begun = session.baseline_candidate, [item.candidate for item in session.log.unfinished]
    if session.baseline is None and session.judge.is_open(first) and first not in begun:
        session.probe(first, Purpose.BASELINE)
    _repeat(session)
    if not session.predictor.promising(1):
        for recipe in session.problem.recipes:
            if _may_go_on(session):
                _consider(session, session.problem.normal(recipe), Purpose.RECIPE)
    while _may_go_on(session):
        candidate = _next(session, proposer)
        if candidate is None:
            return False
        session.probe(candidate, Purpose.SEARCH, _reserve_seconds(session))
        _repeat(session)
    return True


def may_explore(session: Session, *, candidates_left: bool) -> bool:
    """Whether there is something to probe again, since another worker ended before its probe did.

    Args:
        candidates_left: what :func:`explore` returned.
    """
    return any(_may_repeat(session, item) for item in session.log.unfinished) or (
        candidates_left and _may_go_on(session)
    )


def _repeat(session: Session) -> None:
    """Probe what was begun and not finished, by an earlier run or by a worker that is gone."""
    for item in session.log.unfinished:
        if _may_repeat(session, item):
            _consider(session, item.candidate, item.purpose, item.deaths)


def _may_repeat(session: Session, item: Unfinished) -> bool:
    # The limits of the run that started it allowed it, so no reserve is subtracted.
    return session.probes_left > 0 and not session.clock.over() and session.judge.is_open(item.candidate)


def _consider(session: Session, candidate: Candidate, purpose: Purpose, deaths: int = 0) -> None:
    if not session.judge.is_open(candidate):
        return
    veto = session.judge.verdict(candidate)
    if deaths >= DEATHS:
        veto = Veto(f"{deaths} workers were lost while they probed it")
    if purpose is Purpose.BASELINE and deaths < DEATHS:
        # It is what everything else is compared with, whatever is predicted of it.
        veto = None
    if veto is None:
        session.probe(candidate, purpose, _reserve_seconds(session))
    else:
        session.veto(candidate, purpose, veto)


def _next(session: Session, proposer: Proposer) -> Candidate | None:
    first = session.leader()
    for candidate in proposer.proposals(first.candidate if first else None, explore=_samplers_turn(session)):
        veto = session.judge.verdict(candidate)
        if veto is None:
            return candidate
        session.veto(candidate, Purpose.SEARCH, veto)
    return None


def _may_go_on(session: Session) -> bool:
    """Whether the limits allow another probe of this phase."""
    in_vain = probes_without_improvement(session.log.records, session.judge)
    reserved = min(len(_unmeasured(session)), int(session.trials * _LARGEST_RESERVE))
    return (
        session.probes_left > reserved
        and in_vain < session.effort.patience
        and not session.clock.over(_reserve_seconds(session) + session.probe_seconds())
    )


def _reserve_seconds(session: Session) -> float:
    wanted = len(_unmeasured(session)) * session.probe_seconds() + session.settling_seconds()
    return min(wanted, (session.clock.limit_seconds or 0.0) * _LARGEST_RESERVE)


def _unmeasured(session: Session) -> list[Candidate]:
    first = session.leader()
    return unmeasured(session, first) if first else []


def _samplers_turn(session: Session) -> bool:
    """Whether the sampler proposes the next candidate; every second probe refines the best candidate instead.

    In replayed spaces the sampler alone ran out of memory more often, and refinement alone stayed in local optima. If
    speed is predicted, refinement, which includes the candidates predicted to be the fastest, comes first.
    """
    count = sum(record.probed and record.purpose is Purpose.SEARCH for record in session.log.records)
    return count % 2 == (1 if session.predictor.promising(1) else 0)
