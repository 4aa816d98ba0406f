"""The search phase: probes the baseline, then the recipes, then proposed candidates until none is promising.

If speed is predicted, the candidates with the highest predicted speed replace the recipes. After a candidate ran out of
memory, candidates with at least its predicted need come after all others (:class:`Priority`). After a probe timed out,
candidates with micro-batches at least as large come after smaller ones. While nothing fits, one probe is reserved for
the candidate with the smallest predicted need.
"""

from __future__ import annotations

from autotune.core.candidate import Candidate
from autotune.core.status import Ending
from autotune.study.contributions import unmeasured
from autotune.study.judge import Priority, Veto
from autotune.study.problem import Purpose
from autotune.study.proposals import Proposer
from autotune.study.session import Session
from autotune.study.trial_documents import DEATHS, Unfinished

_LARGEST_RESERVE = 1 / 2
"""Maximum share of the time and of the trials that is reserved for contributions, confirmation and comparison."""

_MOST_VETOED_TRACES = 24
"""Number of successive candidates that are traced and vetoed, after which the search ends: a trace takes a few seconds,
and the most promising candidates come first."""

_WORTH = 0.01
"""Minimum expected improvement, as a share of the best rate, for which a search continues. With 2 %, one in ten of the
searches replayed from a measured table ended at two thirds of the best rate."""

_FEWEST = 8
"""Minimum number of probes before a search may end for lack of expected improvement: fewer do not show the prediction
error."""

_UNPREDICTED = 4
"""Factor on the effort's patience if speed is not predicted: with a patience of one, a replayed search ended at 93 % of
the best rate, which it would have found six probes later. Only two such searches were replayed."""

_TRACED_FOR_A_PROBE = 3
"""Maximum number of candidates to trace before choosing the next probe. With six, replayed searches came no closer to
the best rate (benchmarks/replay/distorted_search.py)."""

_COMPARED = 2
"""Number of candidates that are probed before time is reserved for confirmation: a single one has no competitor."""


def explore(session: Session, proposer: Proposer) -> Ending:
    """Probe candidates until the expected improvement is too small, or a limit is reached; return what ended it."""
    session.refresh()
    first, begun = session.baseline_candidate, [item.candidate for item in session.log.unfinished]
    if session.baseline is None and first not in begun:
        _consider(session, first, Purpose.BASELINE)
    _repeat(session)
    if not session.judge.predicts_speed:
        for recipe in _recipes(session):
            if _limited_by(session) is None and not session.judge.failures.is_slow(recipe):
                _consider(session, recipe, Purpose.RECIPE)
    while not isinstance(found := _next(session, proposer), Ending):
        _consider(session, found, Purpose.SEARCH, first=True)
        _repeat(session)
    if (smallest := _last_resort(session)) is not None:
        _consider(session, smallest, Purpose.SEARCH, first=True)
    return found


def _recipes(session: Session) -> list[Candidate]:
    """Return the recipes in their normal form, by descending predicted speed."""

    def rate(recipe: Candidate) -> float:
        guess = session.predictor.predict(recipe)
        return guess.tokens_per_second or 0.0 if guess is not None else 0.0

    return sorted(map(session.problem.normal, session.problem.recipes), key=rate, reverse=True)


def may_explore(session: Session, ending: Ending) -> bool:
    """Whether there is something to probe: an abandoned probe of another worker, or candidates after a winner failed.

    Args:
        ending: the result of :func:`explore`.
    """
    return (
        any(_may_repeat(session, item) for item in session.log.unfinished)
        or (ending not in (Ending.EXHAUSTED, Ending.SAMPLED) and _limited_by(session) is None)
        or _last_resort(session) is not None
    )


def _limited_by(session: Session) -> Ending | None:
    """Return the limit that forbids a further probe of this phase, or None."""
    first, (number, without) = session.leader(), session.without_gain
    patience = session.effort.patience * (1 if session.judge.predicts_speed else _UNPREDICTED)
    if first is not None and first.number == number and without >= patience:
        return Ending.NO_GAIN
    if session.vetoed_traces >= _MOST_VETOED_TRACES:
        return Ending.PATIENCE
    kept = 1 if _smallest(session) is not None else 0
    reserved = min(len(_unmeasured(session)), int(session.trials * _LARGEST_RESERVE))
    if session.probes_left <= max(kept, reserved):
        return Ending.TRIALS
    return None if session.durations.has_time(_reserve_seconds(session)) else Ending.TIME


def _has_no_gain(session: Session, proposer: Proposer) -> bool:
    """Count how often in a row the expected improvement was too small; return whether that ends the search.

    It does not while nothing fits, since that would imply that nothing can fit.
    """
    first = session.leader()
    if first is None or sum(record.probed for record in session.log.records) < _FEWEST:
        return False
    number, count = session.without_gain
    before = count if number == first.number else 0
    gains = proposer.expected_gain(first.candidate) >= _WORTH
    session.without_gain = (first.number, 0 if gains else before + 1)
    return _limited_by(session) is Ending.NO_GAIN


def _last_resort(session: Session) -> Candidate | None:
    """Return the candidate with the smallest predicted need if the probe reserved for it is left."""
    return _smallest(session) if session.probes_left > 0 and not session.clock.over() else None


def _smallest(session: Session) -> Candidate | None:
    """Return the open candidate with the smallest predicted need, if nothing fits and device memory ran out."""
    if session.leader() is not None or not session.judge.failures.of_device_memory:
        return None
    smallest = session.least()
    return smallest if smallest is not None and session.judge.is_open(smallest) else None


def _by_need(session: Session) -> bool:
    """Whether candidates are probed by ascending predicted need, because nothing fits so far."""
    judge = session.judge
    if session.leader() is not None or not judge.failures.of_device_memory:
        return False
    return (judge.failures.surprised or not judge.expects_a_fit) and session.least() is not None


def _repeat(session: Session) -> None:
    """Probe unfinished candidates of an earlier run or of a lost worker."""
    for item in session.log.unfinished:
        if _may_repeat(session, item):
            _consider(session, item.candidate, item.purpose, item.deaths)


def _may_repeat(session: Session, item: Unfinished) -> bool:
    # The patience limit was checked by the run that started it.
    return (
        session.probes_left > 0
        and session.durations.has_time(_reserve_seconds(session))
        and session.judge.is_open(item.candidate)
        and (item.deaths >= DEATHS or _is_in_turn(session, item.candidate, item.purpose))
    )


def _consider(
    session: Session, candidate: Candidate, purpose: Purpose, deaths: int = 0, *, first: bool = False
) -> None:
    """Probe or veto an open candidate; do nothing if another candidate has priority.

    Args:
        first: whether the caller has established that none has.
    """
    if not session.judge.is_open(candidate):
        return
    veto = session.judge.verdict(candidate)
    if deaths >= DEATHS:
        veto = Veto(f"{deaths} workers were lost while they probed it")
    elif purpose is Purpose.BASELINE:
        # The baseline is always probed, regardless of predictions.
        veto = None
    if veto is not None:
        session.veto(candidate, purpose, veto)
    elif first or _is_in_turn(session, candidate, purpose):
        session.probe(candidate, purpose, _reserve_seconds(session, candidate))


def _is_in_turn(session: Session, candidate: Candidate, purpose: Purpose) -> bool:
    """Whether no open candidate has priority over this one."""
    if purpose is Purpose.BASELINE or session.judge.priority(candidate) is Priority.NEXT:
        return True
    return session.least() in (None, candidate)


def _next(session: Session, proposer: Proposer) -> Candidate | Ending:
    """Trace proposals and return the first one worth a probe, or the reason why there is none.

    If predictions were too low, or nothing is predicted to fit, it is the candidate with the smallest predicted need.
    """
    if (limit := _limited_by(session)) is not None:
        return limit
    if _has_no_gain(session, proposer):
        return Ending.NO_GAIN
    judge, traced, by_sampler = session.judge, dict[Candidate, None](), _samplers_turn(session)
    while (smallest := _smallest(session) if _by_need(session) else None) is None:
        first = session.leader()
        incumbent = first.candidate if first is not None else None
        enough = tuple(traced) if len(traced) >= _TRACED_FOR_A_PROBE else ()
        # Ranked by all traces so far.
        candidate = proposer.proposal(incumbent, explore=by_sampler, by_need=_by_need(session), traced=enough)
        if candidate is None:
            return proposer.ending
        known = judge.is_decided(candidate)
        veto = judge.verdict(candidate)
        if veto is not None:
            session.veto(candidate, Purpose.SEARCH, veto)
            session.vetoed_traces += not known
            by_sampler = by_sampler and session.vetoed_traces < _MOST_VETOED_TRACES / 2
        elif candidate in traced or ((known or by_sampler) and _is_in_turn(session, candidate, Purpose.SEARCH)):
            return candidate
        else:
            # With its trace, others may rank before it.
            traced[candidate] = None
            by_sampler = False
        if (limit := _limited_by(session)) is not None:
            return limit
    return smallest


def _reserve_seconds(session: Session, candidate: Candidate | None = None) -> float:
    """Return the seconds that a probe of this phase has to leave.

    While nothing fits, they are reserved for the candidate with the smallest predicted need; afterwards for
    confirmation, comparison and contributions. If time is short, the latter starts with the second probed candidate.

    Args:
        candidate: the candidate to probe; None if it is not chosen yet.
    """
    most = (session.clock.limit_seconds or 0.0) * _LARGEST_RESERVE
    records, durations = session.log.records, session.durations
    if session.leader() is None:
        if _smallest(session) in (None, candidate):
            return 0.0
        return min(max((record.measurement.wall_seconds for record in records), default=0.0), most)
    reserve = min(len(_unmeasured(session)) * durations.probe_seconds + session.settling_seconds(), most)
    compared = sum(record.probed for record in records) + len(session.cut_off)
    return reserve if compared >= _COMPARED or durations.has_time(reserve) else 0.0


def _unmeasured(session: Session) -> list[Candidate]:
    first = session.leader()
    return unmeasured(session, first) if first else []


def _samplers_turn(session: Session) -> bool:
    """Whether the sampler proposes the next candidate; if there is a best candidate, every second probe refines it.

    In replayed spaces, the sampler alone ran out of memory more often, and refinement alone stayed in local optima. If
    speed is predicted, refinement also explores, and found the best candidate in fewer probes without the sampler.
    """
    count = sum(record.probed and record.purpose is Purpose.SEARCH for record in session.log.records)
    return not session.judge.predicts_speed and (count % 2 == 0 or session.leader() is None)
