"""Runs a study that finds the fastest candidate that fits."""

from __future__ import annotations

from functools import partial

from autotune.core.effort import Effort
from autotune.core.events import Listener
from autotune.core.prediction import NoPredictor, Predictor
from autotune.study.audit import audit, contradicted
from autotune.study.clock import Clock
from autotune.study.comparison import failed
from autotune.study.contributions import contributions
from autotune.study.explore import explore, may_explore
from autotune.study.problem import Probe, Problem, SearchOutcome, StudyStorage
from autotune.study.proposals import Proposer
from autotune.study.queue import Queue, Settled, Turn
from autotune.study.roster import Roster
from autotune.study.session import Session, TurnLost
from autotune.study.settle import settle
from autotune.study.storage import opened
from autotune.study.trial_log import TrialLog


def search(
    problem: Problem,
    probe: Probe,
    *,
    effort: Effort,
    memory_limit_bytes: int,
    seed: int,
    trials: int | None,
    timeout_seconds: float | None,
    storage: StudyStorage,
    listener: Listener,
    predictor: Predictor | None = None,
) -> SearchOutcome:
    """Search, attribute and confirm; measurements of earlier runs are kept and not repeated.

    Args:
        memory_limit_bytes: memory that a candidate may need, for the sampler's constraint; the probe enforces it.
        seed: seed of the sampler and of random draws.
        trials: most probes, audits, confirmations and comparisons excluded; None for the effort's.
        timeout_seconds: time limit of this run, confirmation and comparison included; None for no limit.
        predictor: predictions that save probes; None: only probes are used.

    Returns:
        The outcome. ``KeyboardInterrupt`` ends the search early: the outcome so far is returned as interrupted, and
        the probe that was running is repeated when the study is resumed.

    Raises:
        InputError: the storage cannot be used, or the study exists and is not to be resumed.
        StudyMismatchError: the study to be resumed was made for something else.
        AutotuneError: the storage failed during the search, or the probe raised it.
    """
    clock = Clock(timeout_seconds)
    with opened(storage, listener) as study, Roster(study, storage.sharing) as roster:
        log = TrialLog(study, roster, problem.choices, memory_limit_bytes)
        limit = effort.trials if trials is None else trials
        told = predictor or NoPredictor()
        session = Session(problem, probe, log, effort, limit, clock, listener, told)
        # A resumed search must not draw again what an earlier one has drawn, nor what another worker draws.
        drawn = len(study.study.get_trials(deepcopy=False)) + len(roster.others())
        proposer = Proposer(problem, session.judge, study.study, log, told, seed + drawn)
        session.tell_resumed()
        try:
            settled = _searched(session, proposer, Queue(study, roster, session, listener))
        except KeyboardInterrupt:
            return _outcome(session, None, interrupted=True)
        return _outcome(session, settled, interrupted=False)


def _searched(session: Session, proposer: Proposer, queue: Queue) -> Settled | None:
    """Search until nothing is left to do for any worker; return what was settled, or None if time did not allow it."""
    while True:
        candidates_left = explore(session, proposer)
        audit(session, proposer)
        turn = queue.wait(partial(may_explore, session, candidates_left=candidates_left))
        if turn is Turn.SETTLE:
            try:
                settle(session)
            except TurnLost:
                continue
            # What was to be recommended may have failed where it ran again, and nothing else be known to fit.
            left = session.leader() is None and may_explore(session, candidates_left=candidates_left)
            if left or queue.is_disturbed():
                continue
            return queue.settle()
        if turn is not Turn.SEARCH:
            return queue.settled() if turn is Turn.ADOPT else None


def _outcome(session: Session, settled: Settled | None, *, interrupted: bool) -> SearchOutcome:
    known = {record.candidate for record in session.log.records}
    cut_off = [record for record in session.cut_off if record.candidate not in known]
    records = sorted([*session.log.records, *cut_off], key=lambda record: record.number)
    if settled is None:
        winner = session.leader()
        attributed = contributions(session, winner) if winner else ()
    else:
        winner = next((record for record in records if record.number == settled.winner), None)
        attributed = settled.contributions
    return SearchOutcome(
        records=tuple(records),
        baseline=session.baseline,
        winner=winner,
        failed_confirmations=failed(records),
        contributions=attributed,
        confirmed=winner is not None and winner.confirmed,
        interrupted=interrupted,
        contradicted=contradicted(records),
    )
