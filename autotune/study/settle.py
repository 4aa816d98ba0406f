"""Settles on a winner: whether it passes a longer run, and what each of its choices brought."""

from __future__ import annotations

from autotune.study.contributions import measure_contributions
from autotune.study.session import Session


def settle(session: Session) -> None:
    """Confirm the leader, confirm the baseline that it is compared with, and attribute, until nothing is left to do.

    A confirmation that fails or disappoints, and a change back that turns out better, each make another candidate the
    leader, and all begins again with that one. Attribution comes after confirmation, so that the probes that are left
    go to the choices of a candidate that is going to be recommended.
    """
    while (first := session.leader()) is not None and not session.clock.over():
        if not first.confirmed:
            session.confirm(first)
        elif (baseline := session.baseline) is not None and baseline.measurement.ok and baseline.confirmation is None:
            session.confirm(baseline)
        elif not measure_contributions(session, first):
            return
