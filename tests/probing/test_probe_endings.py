"""Every end of a probe, crashes included, gives a measurement with its status and reason."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.jobs.exchange import write_reply
from autotune.core.measurement import Measurement
from autotune.core.plan import Launch
from autotune.core.status import ProbeStatus
from autotune.probing import JobServer, probe
from autotune.probing.server import JobExit, Worker
from autotune.units import format_duration
from tests.probing.misbehaving import PIDS_FILE, request
from tests.probing.processes import running, timed_from, wait_until


def test_a_probe_that_hangs_is_killed_with_every_process_it_started(
    misbehaving_server: JobServer, tmp_path: Path
) -> None:
    with timed_from(tmp_path / PIDS_FILE):
        measurement = probe(misbehaving_server, request("hang"), tmp_path, timeout_seconds=0.1)
    assert measurement.status is ProbeStatus.TIMEOUT
    assert measurement.reason == f"killed after {format_duration(measurement.wall_seconds)}"
    assert measurement.wall_seconds >= 0.1
    pids = json.loads((tmp_path / PIDS_FILE).read_text())
    assert len(pids) == 3
    assert wait_until(lambda: not running(pids))


def test_a_limit_of_the_server_holds_for_jobs_without_one_and_ends_with_its_context(
    misbehaving_server: JobServer, tmp_path: Path
) -> None:
    with (
        timed_from(tmp_path / "1" / PIDS_FILE),
        misbehaving_server.time_limit(0.1),
        misbehaving_server.time_limit(None),
    ):
        assert probe(misbehaving_server, request("hang"), tmp_path / "1").status is ProbeStatus.TIMEOUT
    assert probe(misbehaving_server, request("behave"), tmp_path / "2").ok


def test_a_process_that_a_probe_leaves_behind_is_killed(misbehaving_server: JobServer, tmp_path: Path) -> None:
    assert probe(misbehaving_server, request("leave_a_process_behind"), tmp_path).ok
    assert wait_until(lambda: not running(json.loads((tmp_path / PIDS_FILE).read_text())))


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("kill_itself", "twice killed by signal 9 (SIGKILL); nothing shows that memory was the cause"),
        ("exit_with_3", "ended with exit status 1; its log ends with 'SystemExit: 3'"),
        ("exit_without_reply", "its reply.json is absent"),
        ("print_garbage", "its reply.json is not JSON"),
        ("reply_without_a_document", "its reply.json has the wrong structure"),
        ("reply_in_another_shape", "its reply.json has the wrong structure"),
        ("raise", "ArithmeticError: two and two are five"),
        ("abort", "killed by signal 6 (SIGABRT)"),
    ],
)
def test_a_probe_that_ends_badly_is_crashed_and_says_how(
    misbehaving_server: JobServer, tmp_path: Path, behaviour: str, reason: str
) -> None:
    measurement = probe(misbehaving_server, request(behaviour), tmp_path, timeout_seconds=30.0)
    assert measurement.status is ProbeStatus.CRASHED
    assert measurement.reason.startswith(reason)
    assert measurement.wall_seconds > 0


def test_a_probe_that_something_killed_runs_once_more(misbehaving_server: JobServer, tmp_path: Path) -> None:
    assert probe(misbehaving_server, request("kill_itself_at_first"), tmp_path, timeout_seconds=30.0).ok


@pytest.mark.parametrize(
    ("behaviour", "reason"), [("kill_rank_0_at_first", ""), ("kill_rank_0", "twice rank 0: killed")]
)
def test_a_probe_of_which_something_killed_a_rank_runs_once_more(
    misbehaving_server: JobServer, tmp_path: Path, behaviour: str, reason: str
) -> None:
    asked = request(behaviour)
    asked = replace(asked, plan=replace(asked.plan, launch=Launch(2)))
    measurement = probe(misbehaving_server, asked, tmp_path, timeout_seconds=30.0)
    assert (measurement.ok, measurement.reason.startswith(reason)) == (not reason, True)


@pytest.mark.parametrize(("limit_seconds", "runs"), [(None, 2), (250.0, 2), (150.0, 1)])
def test_a_probe_that_is_killed_late_does_not_run_again_into_its_time_limit(
    misbehaving_server: JobServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit_seconds: float | None,
    runs: int,
) -> None:
    limits: list[float | None] = []

    def killed(server: JobServer, job: str, asked: object, folder: Path, seconds: float | None) -> JobExit:
        limits.append(seconds)
        return JobExit(100.0, signal=signal.SIGKILL)

    monkeypatch.setattr(JobServer, "run", killed)
    found = probe(misbehaving_server, request("behave"), tmp_path, limit_seconds)
    assert (found.status, len(limits)) == (ProbeStatus.CRASHED, runs)
    assert limits[1:] == [None if limit_seconds is None else 150.0][: runs - 1]


def test_an_allocation_that_fails_in_cpp_under_a_limit_is_out_of_memory(
    misbehaving_server: JobServer, tmp_path: Path
) -> None:
    measurement = probe(misbehaving_server, request("fail_to_allocate_in_cpp", limit_bytes=2**30), tmp_path)
    assert measurement.status is ProbeStatus.OUT_OF_MEMORY
    assert "std::bad_alloc" in measurement.reason
    assert "limit of 1.00 GiB" in measurement.reason


def test_without_a_limit_the_same_failure_is_no_evidence_for_the_budget(
    misbehaving_server: JobServer, tmp_path: Path
) -> None:
    measurement = probe(misbehaving_server, request("fail_to_allocate_in_cpp"), tmp_path)
    assert measurement.status is ProbeStatus.CRASHED


def test_what_a_probe_prints_goes_to_its_log_and_confuses_nobody(misbehaving_server: JobServer, tmp_path: Path) -> None:
    assert probe(misbehaving_server, request("print_noise"), tmp_path / "noisy").ok
    assert (tmp_path / "noisy" / "log.txt").read_text().count('{"event": "ready"}') == 10_000
    assert probe(misbehaving_server, request("behave"), tmp_path / "next").ok


def test_the_reply_of_an_earlier_try_in_the_same_folder_is_not_taken_for_this_ones(
    misbehaving_server: JobServer, tmp_path: Path
) -> None:
    assert probe(misbehaving_server, request("behave"), tmp_path).ok
    assert probe(misbehaving_server, request("exit_without_reply"), tmp_path).status is ProbeStatus.CRASHED


def test_nothing_lies_in_a_probe_folder_but_request_reply_and_log(
    misbehaving_server: JobServer, tmp_path: Path
) -> None:
    probe(misbehaving_server, request("behave"), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log.txt", "reply.json", "request.json"]


class Rank(Worker):
    """The first of two ranks fails, and the second one is killed."""

    kills = 0

    def __init__(self, server: JobServer) -> None:
        self.killed = threading.Event()

    def run(
        self,
        job: str,
        request: object,
        folder: Path,
        timeout_seconds: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> JobExit:
        assert env is not None
        folder.mkdir(parents=True)
        if env["RANK"] == "0":
            write_reply(folder, Measurement(ProbeStatus.CRASHED, "connection closed by peer"))
            return JobExit(1.0, code=0)
        assert self.killed.wait(60)
        return JobExit(1.0, signal=signal.SIGKILL, oom_kills=self.kills)

    def interrupt(self) -> None:
        self.killed.set()

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("kills", "status", "reason"),
    [
        (0, ProbeStatus.CRASHED, "rank 0: connection closed by peer"),
        (1, ProbeStatus.HOST_OUT_OF_MEMORY, "rank 1: killed by the kernel"),
    ],
)
def test_a_rank_that_is_killed_after_another_has_failed_counts_only_if_memory_ran_out(
    misbehaving_server: JobServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kills: int,
    status: ProbeStatus,
    reason: str,
) -> None:
    monkeypatch.setattr("autotune.probing.jobs.Worker", Rank)
    monkeypatch.setattr(Rank, "kills", kills)
    asked = request("behave")
    found = probe(misbehaving_server, replace(asked, plan=replace(asked.plan, launch=Launch(2))), tmp_path / "probe")
    assert found.status is status
    assert found.reason.startswith(reason)
