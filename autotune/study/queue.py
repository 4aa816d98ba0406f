"""Selects the worker of a study that confirms and attributes once no worker probes; the others adopt its result.

The order follows Lamport's bakery algorithm: each worker draws a ticket above all others in the study. It only requires
that each worker can write its own entry in the storage and read others'. A worker with a lapsed lease counts as gone;
if it is alive, it draws a new ticket, since workers behind it may have gone first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from autotune.core.codec import DecodeError, decode, encode
from autotune.core.events import Listener, Noted, StageStarted
from autotune.core.result import Contribution
from autotune.core.status import Ending
from autotune.study.contributions import contributions, unmeasured_reverts
from autotune.study.problem import Record
from autotune.study.roster import Activity, Roster, Worker
from autotune.study.session import Session
from autotune.study.storage import OpenStudy
from autotune.study.trial_documents import RECOMMENDED

_SETTLED = "autotune:settled"


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
    """Queue of the workers that have nothing left to probe, from this worker's view."""

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
                self._listener(Noted(f"The time limit ended the wait for {_names(ahead)}; --resume goes on."))
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
