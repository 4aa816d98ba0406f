"""Runs a study that finds the fastest candidate that fits, and settles on a winner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from autotune.core.documents.result import Contribution, Smallest
from autotune.core.effort import Effort
from autotune.core.events import Listener, Noted, StageStarted
from autotune.core.files.codec import DecodeError, decode, encode
from autotune.core.prediction import Predictor
from autotune.core.status import Ending
from autotune.study.comparison import failed
from autotune.study.contributions import contributions, measure_contributions, unmeasured_reverts
from autotune.study.durations import Clock
from autotune.study.explore import explore, may_explore
from autotune.study.problem import Probe, Problem, Record, SearchOutcome, StudyStorage
from autotune.study.proposals import Proposer
from autotune.study.roster import Activity, Roster, Worker
from autotune.study.session import Session, TurnLost
from autotune.study.storage import OpenStudy, opened
from autotune.study.trial_documents import RECOMMENDED
from autotune.study.trial_log import TrialLog

_SETTLED = "autotune:settled"


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
        StudyMismatchError: the study to be resumed was made for another search.
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
        attributed = contributions(session, winner, interrupted=ending is None) if winner else ()
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


class NextAction(Enum):
    """The next action of a worker that has waited.

    Attributes:
        SETTLE: confirm and attribute.
        SEARCH: probe candidates again.
        ADOPT: adopt the settled result of another worker.
        LEAVE: end with the result so far, since the time is over.
    """

    SETTLE = auto()
    SEARCH = auto()
    ADOPT = auto()
    LEAVE = auto()


@dataclass(frozen=True)
class Settled:
    """A worker's settled result, for the others.

    Attributes:
        after: number of the last record that the worker knew, -1 for none.
        winner: number of the recommended trial, or None.
        complete: whether nothing was left to do.
        asked: the limits of the worker's search.
        ending: what ended the worker's search for further candidates.
    """

    after: int
    winner: int | None
    contributions: tuple[Contribution, ...]
    complete: bool
    asked: str
    ending: Ending


class Queue:
    """Queue of the workers that have nothing left to probe, from this worker's view.

    It selects the worker that confirms and attributes once no worker probes; the others adopt its result. The order
    follows Lamport's bakery algorithm: each worker draws a ticket above all others in the study. It only requires that
    each worker can write its own entry in the storage and read others'. A worker with a lapsed lease counts as gone; if
    it is alive, it draws a new ticket, since workers behind it may have gone first.
    """

    def __init__(self, opened: OpenStudy, roster: Roster, session: Session, listener: Listener) -> None:
        self._opened = opened
        self._roster = roster
        self._session = session
        self._listener = listener
        self._last_stage = ""

    def wait(self, may_search: Callable[[], bool]) -> NextAction:
        """Wait until no worker probes and it is this worker's turn, or waiting is pointless; return the next action."""
        roster, session = self._roster, self._session
        self._take_ticket()
        while True:
            # Read the roster before the records: a worker that has left has stored all of its records.
            ahead = [worker for worker in roster.others() if self._is_ahead(worker)]
            session.refresh()
            if roster.lapsed:
                self._take_ticket()
                continue
            # The first waiting worker may be settling; do not search meanwhile.
            if all(worker.doing is Activity.SEARCHING for worker in ahead) and may_search():
                roster.set_activity(Activity.SEARCHING)
                return NextAction.SEARCH
            if not ahead:
                return NextAction.SETTLE if self.settled() is None else NextAction.ADOPT
            # Settling takes minutes; a search may have no limit.
            if session.clock.over() and all(worker.doing is Activity.SEARCHING for worker in ahead):
                self._listener(Noted(f"The time limit ended the wait for {_names(ahead)}; --resume continues."))
                return NextAction.LEAVE
            self._report_wait(ahead)
            self._opened.storage.closing.wait(roster.sharing.poll_seconds)

    def settled(self) -> Settled | None:
        """Return the settled result of a worker or an earlier run, if nothing has changed and nothing is left to do."""
        try:
            result = decode(Settled, self._opened.study.user_attrs.get(_SETTLED))
        except DecodeError:
            # There is none, or another version of autotune wrote it.
            return None
        records = self._session.log.records
        last = records[-1].number if records else -1
        if result.after != last or result.asked != self._limits_text():
            return None
        return result if result.complete or self._session.clock.over() else None

    def settle(self, ending: Ending) -> Settled:
        """Store this worker's settled result, and return it."""
        session = self._session
        records, winner = session.log.records, session.leader()
        result = Settled(
            after=records[-1].number if records else -1,
            winner=winner.number if winner else None,
            contributions=contributions(session, winner) if winner else (),
            complete=self._is_complete(winner),
            asked=self._limits_text(),
            ending=ending,
        )
        self._opened.study.set_user_attr(_SETTLED, encode(result))
        self._opened.study.set_user_attr(RECOMMENDED, result.winner)
        return result

    def is_disturbed(self) -> bool:
        """Whether the settled result may be outdated: other workers have new records, or search.

        Also if this worker's lease lapsed, so that another one may be settling in its place.
        """
        known = len(self._session.log.records)
        searching = any(worker.doing is not Activity.WAITING for worker in self._roster.others())
        self._session.refresh()
        return searching or len(self._session.log.records) > known or self._roster.lapsed

    def _take_ticket(self) -> None:
        self._roster.set_activity(Activity.ARRIVING)
        drawn = max((worker.ticket for worker in self._roster.others()), default=0)
        self._roster.set_activity(Activity.WAITING, drawn + 1)

    def _is_ahead(self, worker: Worker) -> bool:
        mine = self._roster.me
        return worker.doing is not Activity.WAITING or (worker.ticket, worker.key) < (mine.ticket, mine.key)

    def _is_complete(self, winner: Record | None) -> bool:
        session = self._session
        if winner is None:
            return not session.clock.over()
        measured = session.probes_left <= 0 or not unmeasured_reverts(session, winner)
        return winner.confirmed and session.next_turn(winner) is None and measured

    def _limits_text(self) -> str:
        return repr((self._session.trials, self._session.effort))

    def _report_wait(self, ahead: list[Worker]) -> None:
        searching = [worker for worker in ahead if worker.doing is Activity.SEARCHING]
        stage = f"Waiting for {_names(searching)}" if searching else f"Waiting while {_names(ahead[:1])} confirms"
        if stage != self._last_stage:
            self._last_stage = stage
            self._listener(StageStarted(stage))


def _names(workers: list[Worker]) -> str:
    return ", ".join(sorted(worker.name for worker in workers))
