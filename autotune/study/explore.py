"""The search phase: probes the baseline, then the recipes, then proposed candidates until none is promising.

If speed is predicted, the candidates with the highest predicted speed replace the recipes. After a probe timed out,
candidates with micro-batches at least as large come after smaller ones. While nothing fits, one probe is reserved for
the candidate with the smallest predicted need, which comes next if predictions were too low.
"""

from __future__ import annotations

from autotune.core.candidate import Candidate
from autotune.core.status import Ending
from autotune.study.contributions import unmeasured_reverts
from autotune.study.judge import Veto
from autotune.study.problem import Purpose
from autotune.study.proposals import Proposer
from autotune.study.session import Session
from autotune.study.trial_documents import MAX_DEATHS, Unfinished

_MAX_RESERVE_SHARE = 1 / 2
"""Maximum share of the time and of the trials that is reserved for contributions, confirmation and comparison."""

_MAX_VETOED_TRACES = 24
"""Number of successive candidates that are traced and vetoed, after which the search ends: a trace takes a few seconds,
and the most promising candidates come first."""

_MIN_IMPROVEMENT = 0.01
"""Minimum expected improvement, as a share of the best rate, for which a search continues. With 2 %, one in ten of the
searches replayed from a measured table ended at two thirds of the best rate."""

_UNPREDICTED_FACTOR = 4
"""Factor on the effort's patience if speed is not predicted: with a patience of one, a replayed search ended at 93 % of
the best rate, which it would have found six probes later. Only two such searches were replayed."""

_MAX_TRACED_PER_PROBE = 3
"""Maximum number of candidates to trace before choosing the next probe. With six, replayed searches came no closer to
the best rate (benchmarks/replay/distorted_search.py)."""

_PROBES_BEFORE_RESERVE = 2
"""Number of probes before time is reserved for confirmation: a single candidate has no competitor."""


def explore(session: Session, proposer: Proposer) -> Ending:
    """Probe candidates until the expected improvement is too small, or a limit is reached; return what ended it."""
    session.refresh()
    first, begun = session.baseline_candidate, [item.candidate for item in session.log.unfinished]
    if session.baseline is None and first not in begun:
        _probe_or_veto(session, first, Purpose.BASELINE)
    _repeat_unfinished(session)
    if not session.judge.predicts_speed:
        for recipe in map(session.problem.normal, session.problem.recipes):
            if _limit_reached(session) is None and not session.judge.failures.is_slow(recipe):
                _probe_or_veto(session, recipe, Purpose.RECIPE)
    while not isinstance(proposal := _next(session, proposer), Ending):
        _probe_or_veto(session, proposal, Purpose.SEARCH)
        _repeat_unfinished(session)
    if (smallest := _last_resort(session)) is not None:
        session.probe(smallest, Purpose.SEARCH)
    return proposal


def may_explore(session: Session, ending: Ending) -> bool:
    """Whether there is something to probe: an abandoned probe of another worker, or candidates after a winner failed.

    Args:
        ending: the result of :func:`explore`.
    """
    return (
        any(_may_repeat(session, item) for item in session.log.unfinished)
        or (ending not in (Ending.EXHAUSTED, Ending.SAMPLED) and _limit_reached(session) is None)
        or _last_resort(session) is not None
    )


def _limit_reached(session: Session) -> Ending | None:
    """Return the limit that forbids a further probe of this phase, or None."""
    leading, (number, unimproved) = session.leader(), session.without_gain
    patience = session.effort.patience * (1 if session.judge.predicts_speed else _UNPREDICTED_FACTOR)
    if leading is not None and leading.number == number and unimproved >= patience:
        return Ending.NO_GAIN
    if session.vetoed_traces >= _MAX_VETOED_TRACES:
        return Ending.PATIENCE
    last_resort = 1 if _smallest(session) is not None else 0
    reserved = min(len(_unmeasured(session)), int(session.trials * _MAX_RESERVE_SHARE))
    if session.probes_left <= max(last_resort, reserved):
        return Ending.TRIALS
    return None if session.has_time(_reserve_seconds(session)) else Ending.TIME


def _has_no_gain(session: Session, proposer: Proposer) -> bool:
    """Count successive times that the expected improvement is too small; return whether that ends the search.

    It does not while nothing fits, since that would imply that nothing can fit.
    """
    leading = session.leader()
    if leading is None:
        return False
    number, count = session.without_gain
    previous = count if number == leading.number else 0
    gains = proposer.expected_gain(leading.candidate) >= _MIN_IMPROVEMENT
    session.without_gain = (leading.number, 0 if gains else previous + 1)
    return _limit_reached(session) is Ending.NO_GAIN


def _last_resort(session: Session) -> Candidate | None:
    """Return the candidate to probe before a search ends in which nothing fits: the one of smallest predicted need."""
    return _smallest(session, lacked=True) if session.probes_left > 0 and not session.clock.over() else None


def _smallest(session: Session, *, lacked: bool = False) -> Candidate | None:
    """Return the candidate with the smallest predicted need, if nothing fits and it was neither probed nor is implied.

    It may be vetoed because of its need: that nothing fits is not concluded from predictions alone.

    Args:
        lacked: whether to return it even if no probe ran out of device memory.
    """
    judge = session.judge
    if session.leader() is not None or not (lacked or judge.failures.of_device_memory):
        return None
    smallest = session.least()
    if smallest is None or not judge.is_open(smallest, vetoed=True) or judge.failures.implied(smallest) is not None:
        return None
    return smallest


def _smallest_if_next(session: Session) -> Candidate | None:
    """Return :func:`_smallest` if predictions were too low, or no candidate is predicted to fit."""
    smallest, judge, limit_bytes = _smallest(session), session.judge, session.log.memory_limit_bytes
    comes_next = smallest is not None and (judge.failures.surprised or judge.need_bytes(smallest) > limit_bytes)
    return smallest if comes_next else None


def _repeat_unfinished(session: Session) -> None:
    """Probe unfinished candidates of an earlier run or of a lost worker."""
    for item in session.log.unfinished:
        if _may_repeat(session, item):
            _probe_or_veto(session, item.candidate, item.purpose, item.deaths)


def _may_repeat(session: Session, item: Unfinished) -> bool:
    # The patience limit was checked by the run that started it.
    return (
        session.probes_left > 0
        and session.has_time(_reserve_seconds(session))
        and session.judge.is_open(item.candidate)
    )


def _probe_or_veto(session: Session, candidate: Candidate, purpose: Purpose, deaths: int = 0) -> None:
    """Probe or veto an open candidate."""
    # Probed regardless of predictions.
    regardless = purpose is Purpose.BASELINE or candidate == _smallest(session)
    if not session.judge.is_open(candidate, vetoed=regardless):
        return
    veto = session.judge.verdict(candidate)
    if deaths >= MAX_DEATHS:
        veto = Veto(f"{deaths} workers were lost while they probed it")
    elif regardless:
        veto = None
    if veto is not None:
        session.veto(candidate, purpose, veto)
    else:
        session.probe(candidate, purpose, _reserve_seconds(session, candidate))


def _next(session: Session, proposer: Proposer) -> Candidate | Ending:
    """Trace proposals and return the first one worth a probe, or the reason why there is none.

    If predictions were too low, or nothing is predicted to fit, it is the candidate with the smallest predicted need.
    """
    if (limit := _limit_reached(session)) is not None:
        return limit
    if _has_no_gain(session, proposer):
        return Ending.NO_GAIN
    judge, traced, by_sampler = session.judge, dict[Candidate, None](), _is_samplers_turn(session)
    while (smallest := _smallest_if_next(session)) is None:
        first = session.leader()
        incumbent = first.candidate if first is not None else None
        enough = tuple(traced) if len(traced) >= _MAX_TRACED_PER_PROBE else ()
        # Ranked by all traces so far.
        candidate = proposer.proposal(incumbent, explore=by_sampler, traced=enough)
        if candidate is None:
            return proposer.ending
        known = judge.is_decided(candidate)
        veto = judge.verdict(candidate)
        if veto is not None:
            session.veto(candidate, Purpose.SEARCH, veto)
            session.vetoed_traces += not known
            by_sampler = by_sampler and session.vetoed_traces < _MAX_VETOED_TRACES / 2
        elif candidate in traced or known or by_sampler:
            return candidate
        else:
            # With its trace, others may rank before it.
            traced[candidate] = None
            by_sampler = False
        if (limit := _limit_reached(session)) is not None:
            return limit
    return smallest


def _reserve_seconds(session: Session, candidate: Candidate | None = None) -> float:
    """Return the seconds that a probe of this phase has to leave.

    While nothing fits, they are reserved for the candidate with the smallest predicted need; afterwards for
    confirmation, comparison and contributions. If time is short, the latter starts with the second probed candidate.

    Args:
        candidate: the candidate to probe; None if it is not chosen yet.
    """
    most = (session.clock.limit_seconds or 0.0) * _MAX_RESERVE_SHARE
    records = session.log.records
    if session.leader() is None:
        if _smallest(session) in (None, candidate):
            return 0.0
        return min(max((record.measurement.wall_seconds for record in records), default=0.0), most)
    reserve = min(len(_unmeasured(session)) * session.probe_seconds + session.settling_seconds(), most)
    compared = sum(record.probed for record in records) + len(session.cut_off)
    return reserve if compared >= _PROBES_BEFORE_RESERVE or session.has_time(reserve) else 0.0


def _unmeasured(session: Session) -> list[Candidate]:
    first = session.leader()
    return unmeasured_reverts(session, first) if first else []


def _is_samplers_turn(session: Session) -> bool:
    """Whether the sampler proposes the next candidate; if there is a best candidate, every second probe refines it.

    In replayed spaces, the sampler alone ran out of memory more often, and refinement alone stayed in local optima. If
    speed is predicted, refinement also explores, and found the best candidate in fewer probes without the sampler.
    """
    count = sum(record.probed and record.purpose is Purpose.SEARCH for record in session.log.records)
    return not session.judge.predicts_speed and (count % 2 == 0 or session.leader() is None)
