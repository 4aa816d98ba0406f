"""Confirms a winner by longer and repeated runs, and measures the contributions of its choices."""

from __future__ import annotations

from autotune.study.contributions import measure_contributions
from autotune.study.session import Session


def settle(session: Session) -> None:
    """Confirm the leader, compare it with the baseline in alternating runs, and attribute, until nothing is left to do.

    If a run fails or is slower, or if changing a choice back turns out better, another candidate becomes the leader
    and these steps start again with it. Attribution comes last, so that the remaining probes are spent on a candidate
    that will be recommended, and the remaining time is spent on confirmation first.
    """
    while (first := session.leader()) is not None and not session.clock.over():
        if not first.confirmed:
            session.confirm(first)
        elif (turn := session.next_turn(first)) is not None:
            session.compare(turn)
        elif not measure_contributions(session, first):
            return
