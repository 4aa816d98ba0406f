"""Several processes search one study: no probe is lost or repeated, and all end with the same result."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend

from tests.study.postgres import Postgres, lacking
from tests.study.workers import Workers, assert_shared

OUTLASTING_SECONDS = 60.0
"""A lease that is longer than the time after which Optuna removes the lock of a writer that was killed."""


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Workers]:
    """Workers that share a journal on a file system."""
    workers = Workers(f"journal://{tmp_path / 'study.log'}", tmp_path)
    yield workers
    workers.end()


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    """A server of PostgreSQL."""
    if why := lacking():
        pytest.skip(why)
    server = Postgres()
    yield server
    server.remove()


def journal_study(workers: Workers) -> optuna.Study:
    storage = optuna.storages.JournalStorage(JournalFileBackend(workers.url.removeprefix("journal://")))
    return optuna.load_study(storage=storage, study_name="s")


@pytest.mark.parametrize(
    "apart",
    [False, pytest.param(True, marks=pytest.mark.nightly)],
    ids=["of this machine", "of another, missed when its lease has lapsed"],
)
def test_three_workers_share_a_journal_and_one_of_them_is_killed(journal: Workers, apart: bool) -> None:
    if apart:
        journal.apart, journal.lease_seconds = True, OUTLASTING_SECONDS
    journal.start(3, moments=[3])
    with journal.held_after(3):
        journal.kill(random.Random(0))
    outcomes = journal.outcomes()
    assert len(outcomes) == 2
    assert len(assert_shared(journal, outcomes, journal_study(journal))) == 1


@pytest.mark.nightly
def test_a_worker_that_stops_for_longer_than_its_lease_joins_again(journal: Workers) -> None:
    journal.trials, journal.probe_seconds, journal.lease_seconds = 16, 0.4, 3.0
    journal.start(2, moments=[2])
    with journal.held_after(2):
        slept = journal.strike(signal.SIGSTOP, random.Random(0))
    stopped = int(next(words[2] for words in reversed(journal.lines()) if words[0] == str(slept.pid)))
    study = journal_study(journal)
    journal.until(lambda _: study.get_trials(deepcopy=False)[stopped].state is optuna.trial.TrialState.FAIL)
    slept.send_signal(signal.SIGCONT)
    first, second = journal.outcomes()
    assert first == second
    assert first.confirmed


# By day, tests/app/test_workers.py has two workers that share one.
@pytest.mark.nightly
def test_three_workers_share_a_file_of_sqlite(tmp_path: Path) -> None:
    workers = Workers(f"sqlite:///{tmp_path / 'study.db'}", tmp_path)
    try:
        workers.start(3)
        outcomes = workers.outcomes()
        assert len(outcomes) == 3
        assert assert_shared(workers, outcomes, optuna.load_study(storage=workers.url, study_name="s")) == []
    finally:
        workers.end()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1])
def test_four_workers_share_postgresql_through_two_kills_and_a_restart(
    postgres: Postgres, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    workers = Workers(postgres.url, tmp_path, trials=30, probe_seconds=0.5)
    if seed == 1:
        workers.apart, workers.lease_seconds = True, 6.0
    moments = sorted(chance.sample(range(3, 22), 3))
    events = ["kill", "kill", "restart"]
    chance.shuffle(events)
    try:
        planned = list(zip(moments, events, strict=True))
        workers.start(4, moments=[moment for moment, event in planned if event == "kill"])
        for moment, event in planned:
            if event == "kill":
                with workers.held_after(moment):
                    workers.kill(chance)
            else:
                workers.until_ended(moment)
                postgres.stop()
                # No worker counts as dead after an outage longer than a lease.
                time.sleep(1.5 * workers.lease_seconds if workers.apart else 0)
                postgres.start()
        outcomes = workers.outcomes()
        assert len(outcomes) == 2
        study = optuna.load_study(storage=postgres.url, study_name="s")
        assert len(assert_shared(workers, outcomes, study)) == 2
    finally:
        workers.end()


@pytest.mark.nightly
def test_three_workers_share_a_grpc_proxy_that_is_killed_and_started_again(tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="grpcio is not installed (extra `grpc`)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    journal = tmp_path / "study.log"
    command = [sys.executable, "-m", "tests.study.proxy", str(journal), str(port)]
    workers = Workers(f"grpc://127.0.0.1:{port}", tmp_path)
    proxy = subprocess.Popen(command)
    try:
        workers.start(3)
        workers.until_ended(4)
        proxy.kill()
        proxy.wait()
        time.sleep(1)
        proxy = subprocess.Popen(command)
        outcomes = workers.outcomes()
        assert len(outcomes) == 3
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
        study = optuna.load_study(storage=storage, study_name="s")
        assert assert_shared(workers, outcomes, study) == []
    finally:
        workers.end()
        proxy.kill()
        proxy.wait()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1])
def test_four_workers_share_a_journal_through_two_kills(journal: Workers, seed: int) -> None:
    chance = random.Random(seed)
    journal.trials, journal.probe_seconds = 30, 0.5
    if seed == 1:
        journal.apart, journal.lease_seconds = True, OUTLASTING_SECONDS
    moments = sorted(chance.sample(range(3, 22), 2))
    journal.start(4, moments)
    for moment in moments:
        with journal.held_after(moment):
            journal.kill(chance)
    outcomes = journal.outcomes()
    assert len(outcomes) == 2
    assert len(assert_shared(journal, outcomes, journal_study(journal))) == 2
