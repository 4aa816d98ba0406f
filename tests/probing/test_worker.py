"""A worker runs jobs one after another in one process, and ends if it is closed or killed, or its server ends."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from autotune.core.jobs.protocol import LOG_FILE, REPLY_FILE, Job
from autotune.probing import JobServer, probe
from autotune.probing.server import Worker
from tests.probing.misbehaving import MODULE, PIDS_FILE, request
from tests.probing.processes import quick_servers, running, stop, timed_from, wait_until

pytestmark = pytest.mark.usefixtures("quick_start")


@pytest.fixture(scope="module")
def server() -> Iterator[JobServer]:
    with quick_servers(), JobServer("cpu", jobs_module=MODULE) as running:
        yield running


def children(server: JobServer) -> list[int]:
    return [child.pid for child in psutil.Process(server.pid).children()]


def test_jobs_run_in_one_process_beside_those_of_the_server(server: JobServer, tmp_path: Path) -> None:
    worker = Worker(server)
    assert worker.run(Job.PROBE, request("behave"), tmp_path / "1").code == 0
    (pid,) = children(server)
    assert probe(server, request("behave"), tmp_path / "2").ok
    ended = worker.run(Job.PROBE, request("print_noise"), tmp_path / "3")
    assert (ended.code, ended.server_died, ended.timed_out, worker.jobs) == (0, False, False, 2)
    assert children(server) == [pid]
    assert all((tmp_path / number / REPLY_FILE).exists() for number in "123")
    # What a job prints is in its own log.
    assert (tmp_path / "1" / LOG_FILE).stat().st_size < (tmp_path / "3" / LOG_FILE).stat().st_size
    worker.close()
    assert wait_until(lambda: not children(server))


def test_one_that_dies_is_told_from_one_that_ran_its_job(server: JobServer, tmp_path: Path) -> None:
    worker = Worker(server)
    assert worker.run(Job.PROBE, request("kill_itself"), tmp_path / "1").signal == signal.SIGKILL
    # It is gone for good, and the server is not.
    assert worker.run(Job.PROBE, request("behave"), tmp_path / "2").server_died
    assert probe(server, request("behave"), tmp_path / "3").ok


def test_the_kernel_s_kills_during_a_job_are_counted(
    server: JobServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter((3, 5))
    monkeypatch.setattr("autotune.probing.server.out_of_memory_kills", lambda: next(counts))
    ending = Worker(server).run(Job.PROBE, request("kill_itself"), tmp_path)
    assert (ending.signal, ending.oom_kills, ending.ran_out_of_memory) == (signal.SIGKILL, 2, True)


def test_a_job_that_takes_too_long_is_killed_with_all_that_it_started(server: JobServer, tmp_path: Path) -> None:
    worker = Worker(server)
    assert worker.run(Job.PROBE, request("behave"), tmp_path / "1").code == 0
    with timed_from(tmp_path / "2" / PIDS_FILE):
        assert worker.run(Job.PROBE, request("hang"), tmp_path / "2", timeout_seconds=0.1).timed_out
    pids = json.loads((tmp_path / "2" / PIDS_FILE).read_text())
    assert len(pids) == 3
    assert wait_until(lambda: not running(pids))


def test_another_thread_can_interrupt_it(server: JobServer, tmp_path: Path) -> None:
    worker = Worker(server)

    def interrupt() -> None:
        assert wait_until((tmp_path / "1" / PIDS_FILE).exists)
        worker.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert worker.run(Job.PROBE, request("hang"), tmp_path / "1").signal == signal.SIGKILL
    thread.join()
    assert wait_until(lambda: not running(json.loads((tmp_path / "1" / PIDS_FILE).read_text())))


def test_one_that_is_closed_before_it_is_ready_leaves_no_process(server: JobServer, tmp_path: Path) -> None:
    server.wait()
    for _ in range(3):
        Worker(server).close()
    assert probe(server, request("behave"), tmp_path / "probe").ok
    assert wait_until(lambda: not children(server))


def test_it_ends_with_its_server_and_the_next_one_gets_another(tmp_path: Path) -> None:
    with JobServer("cpu", jobs_module=MODULE) as server:
        worker = Worker(server)
        assert worker.run(Job.PROBE, request("behave"), tmp_path / "behave").code == 0
        pids = children(server)
        psutil.Process(server.pid).send_signal(signal.SIGKILL)
        assert wait_until(lambda: not running(pids))
        assert worker.run(Job.PROBE, request("behave"), tmp_path / "lost").server_died
        other = Worker(server)
        assert other.run(Job.PROBE, request("behave"), tmp_path / "again").code == 0
        pids = children(server)
    assert wait_until(lambda: not running(pids))


def test_all_whose_server_dies_before_it_forks_are_forked_by_the_next(tmp_path: Path) -> None:
    with JobServer("cpu", jobs_module=MODULE) as server:
        server.wait()
        assert server.pid is not None
        stop(server.pid)
        with ThreadPoolExecutor(8) as pool:
            endings = pool.map(
                lambda number: Worker(server).run(Job.PROBE, request("behave"), tmp_path / f"job-{number}"), range(8)
            )
            psutil.Process(server.pid).kill()
            assert [ending.code for ending in endings] == [0] * 8


def test_servers_may_die_again_once_a_worker_has_completed_a_job(tmp_path: Path) -> None:
    with JobServer("cpu", jobs_module=MODULE) as server:
        for number in range(3):
            worker = Worker(server)
            assert worker.run(Job.PROBE, request("behave"), tmp_path / f"job-{number}").code == 0
            psutil.Process(server.pid).kill()
            worker.close()
