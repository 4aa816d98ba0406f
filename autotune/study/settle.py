"""Settles on a winner: whether it passes longer and repeated runs, and what each of its choices brought."""

from __future__ import annotations

from autotune.study.contributions import measure_contributions
from autotune.study.session import Session


def settle(session: Session) -> None:
    """Confirm the leader, let it take turns with the baseline, and attribute, until nothing is left to do.

    A run that fails or disappoints, and a change back that turns out better, each make another candidate the leader,
    and all begins again with that one. Attribution comes last, so that the probes that are left go to the choices of a
    candidate that is going to be recommended, and so that the time that is left goes to the promise first.
    """
    while (first := session.leader()) is not None and not session.clock.over():
        if not first.confirmed:
            session.confirm(first)
        elif (turn := session.next_turn(first)) is not None:
            session.compare(turn)
        elif not measure_contributions(session, first):
            return
