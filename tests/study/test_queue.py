"""Several workers of one study: one of them settles it, and the others wait and adopt its result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import optuna
import pytest

from autotune.core.candidate import Candidate
from autotune.core.events import Event, Noted, StageStarted
from autotune.core.files.codec import decode
from autotune.core.measurement import Measurement
from autotune.core.status import ProbeStatus
from autotune.study.durations import Clock
from autotune.study.problem import ProbeRun, Purpose, SearchOutcome, Sharing
from autotune.study.trial_documents import MAX_DEATHS
from tests.probing.processes import wait_until
from tests.study.killed import kill_in_the_middle
from tests.study.replayed import ReplayedTable, measurement
from tests.study.running import PATIENT, QUICK, Run, probed


@dataclass
class Beside:
    """Another worker of a study, in a thread of this process.

    Attributes:
        asked: what it was asked to run.
    """

    run: Run
    probe: Callable[[ProbeRun], Measurement]
    asked: list[ProbeRun] = field(default_factory=list)
    outcome: SearchOutcome | None = None

    def start(self, **limits: object) -> threading.Thread:
        """Start it."""

        def search() -> None:
            def probe(run: ProbeRun, seconds_left: float | None) -> Measurement:
                self.asked.append(run)
                return self.probe(run)

            self.outcome = self.run(probe, resume=True, **limits)  # type: ignore[arg-type]

        thread = threading.Thread(target=search)
        thread.start()
        return thread


def said(events: list[Event], kind: type[StageStarted] | type[Noted]) -> str:
    return " ".join(event.text for event in events if isinstance(event, kind))


def test_who_has_nothing_left_to_probe_waits_for_the_others_and_says_for_whom(durable: Run) -> None:
    begun = threading.Event()

    def slow(run: ProbeRun) -> Measurement:
        begun.set()
        assert wait_until(lambda: "Waiting for" in said(durable.events, StageStarted))
        return measurement(run.candidate)

    other = Beside(Run(durable.url), slow)
    thread = other.start(trials=3)
    assert begun.wait(60)
    asked: list[ProbeRun] = []

    def probe(run: ProbeRun, seconds_left: float | None) -> Measurement:
        asked.append(run)
        return measurement(run.candidate)

    outcome = durable(probe, trials=3, resume=True)
    thread.join()
    assert other.outcome == outcome
    assert outcome.confirmed
    assert len(probed(outcome)) == 3
    assert "Waiting for" in said(durable.events, StageStarted)
    both = [*asked, *other.asked]
    assert sum(run.purpose is Purpose.CONFIRMATION for run in both) == 1
    assert len({(run.number, run.purpose, run.turn) for run in both}) == len(both)


def test_nobody_overtakes_a_worker_that_settles(durable: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # The second would be the first by its name.
    monkeypatch.setattr("autotune.study.roster._key", iter(["f", "0"]).__next__)
    table = ReplayedTable()
    other = Beside(Run(durable.url), lambda run: table(run, None))
    threads: list[threading.Thread] = []

    def probe(run: ProbeRun, seconds_left: float | None) -> Measurement:
        if run.purpose is Purpose.CONFIRMATION and not threads:
            threads.append(other.start(trials=3))
            assert wait_until(lambda: "confirms" in said(other.run.events, StageStarted) or other.asked != [])
            # It has looked at the study several times by then.
            time.sleep(10 * QUICK.poll_seconds)
        return measurement(run.candidate)

    outcome = durable(probe, trials=3)
    threads[0].join()
    assert other.asked == []
    assert other.outcome == outcome


def test_the_time_limit_ends_the_wait_for_those_who_search(durable: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, spent = threading.Event(), threading.Event(), threading.Event()

    # Time is up with the first probe, however long it took.
    def left(clock: Clock, reserve_seconds: float = 0.0) -> float | None:
        limit = clock.limit_seconds
        return None if limit is None else 0.0 if spent.is_set() else max(0.0, limit - reserve_seconds)

    def last(run: ProbeRun, _: float | None) -> Measurement:
        spent.set()
        return measurement(run.candidate)

    monkeypatch.setattr(Clock, "left", left)

    def slow(run: ProbeRun) -> Measurement:
        begun.set()
        assert go_on.wait(60)
        return measurement(run.candidate)

    other = Beside(Run(durable.url), slow)
    thread = other.start(trials=2)
    assert begun.wait(60)
    outcome = durable(last, trials=2, resume=True, timeout_seconds=60)
    go_on.set()
    thread.join()
    assert len(probed(outcome)) == 1
    assert not outcome.confirmed
    assert "The time limit ended the wait" in said(durable.events, Noted)
    assert other.outcome is not None
    assert other.outcome.confirmed


def test_what_a_worker_finds_that_joins_during_the_confirmation_is_settled_too(durable: Run) -> None:
    searching = threading.Event()

    def joining(run: ProbeRun) -> Measurement:
        searching.set()
        if run.purpose is Purpose.SEARCH:
            assert wait_until(lambda: "Waiting for" in said(durable.events, StageStarted))
        return Measurement(ProbeStatus.OK, peak_bytes=1, tokens_per_second=1e9)

    other = Beside(Run(durable.url), joining)
    threads: list[threading.Thread] = []

    def probe(run: ProbeRun, seconds_left: float | None) -> Measurement:
        if run.purpose is Purpose.CONFIRMATION and not threads:
            threads.append(other.start(trials=6))
            assert searching.wait(60)
        if other.asked and run.candidate == other.asked[0].candidate:
            return joining(run)
        return measurement(run.candidate)

    outcome = durable(probe, trials=2)
    threads[0].join()
    assert outcome.winner is not None
    assert outcome.winner.candidate == other.asked[0].candidate
    assert outcome.confirmed


def test_what_one_has_settled_another_takes_without_a_run_of_its_own(durable: Run) -> None:
    first = durable(ReplayedTable())
    table = ReplayedTable()
    assert Run(durable.url)(table, resume=True) == first
    assert table.runs == []


def test_who_settles_by_other_limits_settles_for_itself(durable: Run) -> None:
    durable(ReplayedTable(), effort=replace(PATIENT, comparisons=0))
    table = ReplayedTable()
    again = durable(table, effort=replace(PATIENT, comparisons=2), resume=True)
    assert {run.purpose for run in table.runs} == {Purpose.COMPARISON}
    assert again.winner is not None
    assert len(again.winner.comparison) == 4


def test_a_candidate_over_which_workers_are_lost_again_and_again_is_given_up(durable: Run, tmp_path: Path) -> None:
    fatal: Candidate | None = None
    for death in range(MAX_DEATHS):
        log = tmp_path / f"log-{death}"
        # The first is killed in its fourth probe; those that follow repeat that one first.
        begun = kill_in_the_middle(durable.url, log, 4 if death == 0 else 1)
        killed = int(begun[-1].split()[0])
        study = optuna.load_study(storage=durable.url, study_name="s")
        candidate = decode(Candidate, study.trials[killed].user_attrs["candidate"])
        assert fatal is None or candidate == fatal
        fatal = candidate
    table = ReplayedTable()
    outcome = durable(table, resume=True)
    assert fatal not in [run.candidate for run in table.runs]
    (given_up,) = [record for record in outcome.records if record.candidate == fatal]
    assert given_up.measurement.status is ProbeStatus.VETOED
    assert given_up.measurement.reason == "3 workers were lost while they probed it"
    assert len(probed(outcome)) == PATIENT.trials


def test_leases_outlast_the_lock_of_a_writer_of_a_journal_that_was_killed() -> None:
    lock = optuna.storages.journal.JournalFileSymlinkLock("no file")
    assert lock.grace_period is not None
    assert Sharing().lease_seconds > 1.5 * lock.grace_period
