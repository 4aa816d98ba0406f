"""Runs a study that finds the fastest candidate that fits, and settles on a winner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from autotune.core.effort import Effort
from autotune.core.events import Listener
from autotune.core.prediction import Predictor
from autotune.core.result import Smallest
from autotune.core.status import Ending
from autotune.study.comparison import failed
from autotune.study.contributions import contributions, measure_contributions
from autotune.study.durations import Clock
from autotune.study.explore import explore, may_explore
from autotune.study.problem import Probe, Problem, SearchOutcome, StudyStorage
from autotune.study.proposals import Proposer
from autotune.study.queue import NextAction, Queue, Settled
from autotune.study.roster import Roster
from autotune.study.session import Session, TurnLost
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
        memory_limit_bytes: maximum memory need, for the sampler's constraint; the probe enforces it.
        seed: seed of the sampler and of random draws.
        trials: maximum number of probes, excluding confirmations and comparisons; None for the effort's.
        timeout_seconds: time limit of this run, including confirmation and comparison; None for no limit.
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
        log = TrialLog(study, roster, problem, memory_limit_bytes)
        limit = effort.trials if trials is None else trials
        predictor = predictor or Predictor()
        session = Session(problem, probe, log, effort, limit, clock, listener, predictor)
        # Different seeds for resumed searches and for other workers, so that they do not repeat the same draws.
        drawn = len(study.study.get_trials(deepcopy=False)) + len(roster.others())
        proposer = Proposer(problem, session.judge, study.study, log, predictor, seed + drawn)
        session.report_resumed()
        try:
            settled, ending = _run_until_settled(session, proposer, Queue(study, roster, session, listener))
        except KeyboardInterrupt:
            return _outcome(session, None, None)
        return _outcome(session, settled, ending)


def _run_until_settled(session: Session, proposer: Proposer, queue: Queue) -> tuple[Settled | None, Ending]:
    """Search until nothing is left to do for any worker.

    Returns:
        The settled result, or None if time did not suffice; and what ended the search for further candidates.
    """
    session.refresh()
    known, log = queue.settled(), session.log
    # Each run counts the lack of gain anew, so exploring again would probe further candidates.
    if known is not None and known.ending is Ending.NO_GAIN and not (log.unfinished or log.others_running):
        return known, known.ending
    while True:
        ending = explore(session, proposer)
        goes_on = partial(may_explore, session, ending)
        action = queue.wait(goes_on)
        if action is NextAction.SETTLE:
            try:
                searches_again = settle(session, goes_on)
            except TurnLost:
                continue
            if searches_again or queue.is_disturbed():
                continue
            return queue.settle(ending), ending
        if action is not NextAction.SEARCH:
            return queue.settled() if action is NextAction.ADOPT else None, ending


def _outcome(session: Session, settled: Settled | None, ending: Ending | None) -> SearchOutcome:
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
        interrupted=ending is None,
        ending=ending,
        smallest=_smallest(session) if ending is not None and winner is None else None,
    )


def _smallest(session: Session) -> Smallest | None:
    """Return the candidate with the smallest predicted need and its trial, if there are predictions."""
    candidate = session.least()
    guess = session.predictor.predict(candidate) if candidate is not None else None
    if candidate is None or guess is None:
        return None
    record = session.judge.record_for(candidate)
    return Smallest(candidate, guess.need_bytes, record.number if record else None)


def settle(session: Session, may_explore: Callable[[], bool]) -> bool:
    """Confirm the leader, compare it with the baseline in alternating runs, and attribute, until nothing is left to do.

    If a run fails or is slower, or if changing a choice back turns out better, another candidate becomes the leader
    and these steps start again with it. Attribution comes last, so that the remaining probes are spent on a candidate
    that will be recommended, and the remaining time is spent on confirmation first.

    Returns:
        Whether a leader failed in a further run, and there are candidates left to explore.
    """
    while (leading := session.leader()) is not None and not session.clock.over():
        if not leading.confirmed:
            session.run_again(leading.number)
        elif (turn := session.next_turn(leading)) is not None:
            session.run_again(turn.number, turn)
        elif not measure_contributions(session, leading):
            return False
        if leading.number in {record.number for record in failed(session.log.records)} and may_explore():
            return True
    return False
