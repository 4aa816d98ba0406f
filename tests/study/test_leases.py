"""A worker with an expired lease, by a clock that the test sets: others may have replaced it."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
from optuna.storages import InMemoryStorage

from autotune.core.events import Noted, ignore
from autotune.core.measurement import Measurement
from autotune.core.prediction import Predictor
from autotune.errors import AutotuneError
from autotune.study.durations import Clock
from autotune.study.problem import ProbeRun, Purpose, Sharing, StudyStorage
from autotune.study.roster import Activity, Roster, Worker, elapsed_seconds
from autotune.study.searching import NextAction, Queue
from autotune.study.session import Session
from autotune.study.storage import OpenStudy, opened
from autotune.study.trial_log import TrialLog
from tests.study.replayed import LIMIT_BYTES, ReplayedTable, TableProblem, measurement
from tests.study.running import PATIENT, Now, Run

# No lease is renewed during a test but by what the test does.
SHARING = Sharing(interval_seconds=3600.0, poll_seconds=0.01, patience_seconds=1.0)
LAPSED_SECONDS = SHARING.lease_seconds + 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Now:
    """The clock of all leases."""
    made = Now()
    monkeypatch.setattr("autotune.study.roster.elapsed_seconds", made)
    return made


@pytest.fixture
def stack(storage: InMemoryStorage) -> Iterator[ExitStack]:
    """What a test opens."""
    with ExitStack() as opens:
        yield opens


def join(stack: ExitStack) -> tuple[OpenStudy, Roster]:
    study = stack.enter_context(opened(StudyStorage("sqlite://", "s", True, {}, SHARING), ignore))
    return study, stack.enter_context(Roster(study, SHARING))


def test_a_lapse_counts_before_the_lease_is_renewed_and_once(clock: Now, stack: ExitStack) -> None:
    _, roster = join(stack)
    clock.seconds += SHARING.lease_seconds
    assert roster.lapses == 0
    clock.seconds += 1.0
    assert roster.lapses == 1
    roster.set_activity(Activity.WAITING)
    assert roster.lapses == 1
    clock.seconds += LAPSED_SECONDS
    assert roster.lapses == 2


def test_a_lease_runs_from_before_it_is_written_since_another_may_see_it_at_once(
    clock: Now, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, roster = join(stack)
    write = roster._write

    def slowly(worker: Worker) -> None:
        write(worker)
        clock.seconds += 10.0

    monkeypatch.setattr(roster, "_write", slowly)
    roster.set_activity(Activity.WAITING)
    clock.seconds += SHARING.lease_seconds - 5.0
    assert roster.lapses == 1


@pytest.mark.parametrize("error", [MemoryError(), AutotuneError("The storage does not answer.")], ids=repr)
def test_a_renewal_that_fails_does_not_end_those_after_it(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    outcomes, renewed = [error, error], threading.Event()

    def watch(roster: Roster) -> None:
        if outcomes:
            raise outcomes.pop()
        renewed.set()

    monkeypatch.setattr(Roster, "_watch", watch)
    study, _ = join(stack)
    stack.enter_context(Roster(study, replace(SHARING, interval_seconds=0.01)))
    assert renewed.wait(60)


def test_leases_are_measured_by_a_clock_that_counts_suspension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.study.roster.time.clock_gettime", {time.CLOCK_BOOTTIME: 7.0}.__getitem__)
    assert elapsed_seconds() == 7.0


def test_a_worker_whose_process_ended_is_gone_before_its_parent_asks_for_it(stack: ExitStack) -> None:
    (_, first), (_, second) = join(stack), join(stack)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        theirs = replace(second.me, pid=child.pid)
        second._write(theirs)
        assert first.others() == [theirs]
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert first.others() == []
    assert first.others() == []


@pytest.mark.parametrize("purpose", [Purpose.CONFIRMATION, Purpose.COMPARISON])
def test_what_ran_past_the_lease_is_not_stored_and_the_worker_queues_again(
    durable: Run, clock: Now, purpose: Purpose
) -> None:
    slept: list[ProbeRun] = []
    asked: list[ProbeRun] = []

    def probe(run: ProbeRun, seconds_left: float | None) -> Measurement:
        asked.append(run)
        if run.purpose is purpose and not slept:
            slept.append(run)
            clock.seconds += LAPSED_SECONDS
        return measurement(run.candidate)

    search = replace(durable, sharing=SHARING)
    outcome = search(probe, trials=3)
    (noted,) = [event.text for event in search.events if isinstance(event, Noted)]
    assert "queues again" in noted
    assert asked.count(slept[0]) == 2
    assert outcome.confirmed
    assert outcome.winner is not None
    assert len(outcome.winner.comparison) == 2 * PATIENT.comparisons


def test_what_was_settled_past_the_lease_is_not_stored(
    durable: Run, clock: Now, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturbed, seen = Queue.is_disturbed, list[bool]()

    def past_the_lease(queue: Queue) -> bool:
        clock.seconds += LAPSED_SECONDS if not seen else 0.0
        seen.append(disturbed(queue))
        return seen[-1]

    monkeypatch.setattr(Queue, "is_disturbed", past_the_lease)
    outcome = replace(durable, sharing=SHARING)(ReplayedTable(), trials=3)
    assert seen == [True, False]
    assert outcome.confirmed


def test_a_worker_whose_lease_lapses_in_the_queue_goes_behind_those_that_passed_it(
    clock: Now, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    (study, first), (_, second) = join(stack), join(stack)
    log = TrialLog(study, first, TableProblem(), LIMIT_BYTES)
    session = Session(TableProblem(), ReplayedTable(), log, PATIENT, 3, Clock(None), ignore, Predictor())
    read, looks = session.refresh, iter(range(9))

    def meanwhile() -> None:
        look = next(looks)
        if look == 0:
            # The second has taken the first for dead, and settles.
            clock.seconds += LAPSED_SECONDS
            second.set_activity(Activity.WAITING, 5)
        if look == 3:
            second.set_activity(Activity.LEFT)
        read()

    monkeypatch.setattr(session, "refresh", meanwhile)
    assert Queue(study, first, session, ignore).wait(lambda: False) is NextAction.SETTLE
    assert first.me.ticket == 6
    assert next(looks) > 3
