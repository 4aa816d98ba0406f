"""Confirms a winner by longer and repeated runs, and measures the contributions of its choices."""

from __future__ import annotations

from collections.abc import Callable

from autotune.study.comparison import failed
from autotune.study.contributions import measure_contributions
from autotune.study.session import Session


def settle(session: Session, may_explore: Callable[[], bool]) -> bool:
    """Confirm the leader, compare it with the baseline in alternating runs, and attribute, until nothing is left to do.

    If a run fails or is slower, or if changing a choice back turns out better, another candidate becomes the leader
    and these steps start again with it. Attribution comes last, so that the remaining probes are spent on a candidate
    that will be recommended, and the remaining time is spent on confirmation first.

    Returns:
        Whether a leader failed as it ran again, and there are candidates left to look for another.
    """
    while (first := session.leader()) is not None and not session.clock.over():
        if not first.confirmed:
            session.confirm(first)
        elif (turn := session.next_turn(first)) is not None:
            session.compare(turn)
        elif not measure_contributions(session, first):
            return False
        if first.number in {record.number for record in failed(session.log.records)} and may_explore():
            return True
    return False
