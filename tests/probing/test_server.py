"""The job server survives its jobs but not its parent, and is replaced if it dies."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from autotune.core.jobs import exchange
from autotune.core.jobs.protocol import Job
from autotune.core.machine import Share
from autotune.core.status import ProbeStatus
from autotune.errors import InputError, ProbeServerError
from autotune.probing import JobServer, probe
from autotune.probing import server as module
from autotune.probing.server import Worker
from tests.probing.hanging_at_import import FILE, HANGING
from tests.probing.misbehaving import MODULE, PIDS_FILE, PROGRAM_FILE, request
from tests.probing.processes import running, stop, timed_from, wait_until
from tests.probing.without_libraries import MODULE as WITHOUT_LIBRARIES


def test_a_server_starts_in_the_background() -> None:
    with JobServer("cpu") as server:
        assert server._channel is not None
        assert not server._channel.ready
        assert server.pid is not None
        pid = server.pid
    assert not running([pid])


def test_a_server_sees_and_runs_on_its_share_of_the_machine() -> None:
    core = max(os.sched_getaffinity(0))
    with JobServer("cuda", share=Share(gpus="GPU-1,5", cores=(core,))) as server:
        process = psutil.Process(server.pid)
        assert wait_until(lambda: process.cpu_affinity() == [core])
        assert process.environ()["CUDA_VISIBLE_DEVICES"] == "GPU-1,5"
        assert "OMP_WAIT_POLICY" not in process.environ()


def test_threads_of_a_cpu_wait_idly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with JobServer("cpu") as server:
        process = psutil.Process(server.pid)
        # A process has its parent's environment until it runs the server.
        assert wait_until(lambda: process.environ().get("OMP_WAIT_POLICY") == "PASSIVE")


@pytest.mark.usefixtures("quick_start")
def test_a_server_that_died_is_replaced_at_the_next_job_but_not_twice_in_a_row(tmp_path: Path) -> None:
    with JobServer("cpu", jobs_module=MODULE) as server:
        died = probe(server, request("kill_the_server"), tmp_path / "1")
        assert died.status is ProbeStatus.CRASHED
        assert "the process that starts probes died" in died.reason
        assert probe(server, request("behave"), tmp_path / "2").ok
        assert probe(server, request("kill_the_server"), tmp_path / "3").status is ProbeStatus.CRASHED
        with pytest.raises(ProbeServerError, match="died twice"):
            probe(server, request("kill_the_server"), tmp_path / "4")


@pytest.mark.usefixtures("quick_start")
def test_a_server_that_died_between_jobs_is_not_noticed(tmp_path: Path) -> None:
    with JobServer("cpu", jobs_module=MODULE) as server:
        assert probe(server, request("behave"), tmp_path / "1").ok
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        assert probe(server, request("behave"), tmp_path / "2").ok


@pytest.mark.usefixtures("quick_start")
def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        JobServer("cpu", jobs_module="no.such.module") as server,
        pytest.raises(ProbeServerError, match=r"(?s)could not be started.*No module named 'no'"),
    ):
        probe(server, request("behave"), tmp_path)


@pytest.mark.usefixtures("quick_start")
def test_a_server_that_is_killed_while_it_starts_is_started_once_more(tmp_path: Path) -> None:
    with JobServer("cpu", jobs_module=MODULE) as server:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        assert probe(server, request("behave"), tmp_path / "1").ok
    with (
        JobServer("cpu", jobs_module="tests.probing.killed_at_import") as server,
        pytest.raises(ProbeServerError, match=r"was killed by signal 9 \(SIGKILL\) twice while it started"),
    ):
        probe(server, request("behave"), tmp_path / "2")


@pytest.mark.usefixtures("quick_start")
def test_a_server_whose_imports_hang_is_ended_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_SECONDS", 0.1)
    monkeypatch.setenv(FILE, str(tmp_path / "imports"))
    with timed_from(tmp_path / "imports"), JobServer("cpu", jobs_module=HANGING) as server:
        pid = server.pid
        with pytest.raises(ProbeServerError, match=r"has not started in .*: its imports hang\.") as caught:
            probe(server, request("behave"), tmp_path)
    assert pid is not None
    assert not running([pid])
    assert "hanging_at_import.py" in caught.value.hint
    assert "in wait_for_a_drive" in caught.value.hint


@pytest.mark.usefixtures("quick_start")
def test_a_server_that_no_longer_starts_processes_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with JobServer("cpu", jobs_module=MODULE) as server:
        pid = server.wait().pid
        assert pid is not None
        stop(pid)
        monkeypatch.setattr(module, "START_SECONDS", 0.1)
        monkeypatch.setattr("autotune.probing.channel._CLOSING_SECONDS", 0.1)
        with pytest.raises(ProbeServerError, match="has not started one in"):
            probe(server, request("behave"), tmp_path)
        assert wait_until(lambda: not running([pid]))


@pytest.mark.usefixtures("quick_start")
@pytest.mark.parametrize("spawn", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_job_is_forked_unless_it_is_to_be_spawned_and_no_file_of_the_user_s_stands_in_for_a_module(
    tmp_path: Path, spawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The server imports the first, a process that is spawned the second.
    for name in ("selectors.py", "datasets.py"):
        (tmp_path / name).write_text("raise SystemExit('taken for the library')")
    monkeypatch.chdir(tmp_path)
    with JobServer("cpu", spawn=spawn, jobs_module=MODULE) as server:
        assert probe(server, request("name_its_program"), tmp_path / "probe").ok
    assert (b"--worker" in (tmp_path / "probe" / PROGRAM_FILE).read_bytes()) is spawn


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_start")
def test_a_spawned_job_leads_a_group_that_ends_with_it(tmp_path: Path) -> None:
    with JobServer("cpu", spawn=True, jobs_module=MODULE) as server:
        assert probe(server, request("leave_a_process_behind"), tmp_path).ok
        assert wait_until(lambda: not running(json.loads((tmp_path / PIDS_FILE).read_text())))


def test_ctrl_c_ends_the_running_probe_and_the_server_goes_on(misbehaving_server: JobServer, tmp_path: Path) -> None:
    def interrupt() -> None:
        assert wait_until((tmp_path / "1" / PIDS_FILE).exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        probe(misbehaving_server, request("hang"), tmp_path / "1")
    assert wait_until(lambda: not running(json.loads((tmp_path / "1" / PIDS_FILE).read_text())))
    assert probe(misbehaving_server, request("behave"), tmp_path / "2").ok


def test_nothing_is_left_running_when_the_parent_is_killed(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from autotune.probing import JobServer, channel, probe
from tests.probing.misbehaving import MODULE, request
channel._SERVER = {WITHOUT_LIBRARIES!r}
server = JobServer("cpu", jobs_module=MODULE)
print(server.pid, flush=True)
probe(server, request("hang"), Path({str(tmp_path)!r}))
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = int(parent.stdout.readline())
    assert wait_until((tmp_path / PIDS_FILE).exists)
    pids = [server, *json.loads((tmp_path / PIDS_FILE).read_text())]
    assert running(pids) == pids
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert wait_until(lambda: not running(pids))


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_as_such(
    misbehaving_server: JobServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "write_document", full)
    with pytest.raises(InputError, match=r"No space left on device\. Free some space, or "):
        probe(misbehaving_server, request("behave"), tmp_path)


@pytest.mark.parametrize("behaviour", ["exit_without_reply", "kill_itself"])
def test_a_reply_that_a_full_disk_has_no_room_for_is_no_measurement(
    misbehaving_server: JobServer, tmp_path: Path, behaviour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(InputError, match=f"{tmp_path} cannot be written: No space left on device. Free some space"):
        probe(misbehaving_server, request(behaviour), tmp_path)


def test_a_training_that_finds_a_full_disk_is_no_measurement(misbehaving_server: JobServer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no space left on a disk"):
        probe(misbehaving_server, request("fill_the_disk"), tmp_path)


def test_a_probe_whose_folder_is_removed_is_no_measurement(misbehaving_server: JobServer, tmp_path: Path) -> None:
    folder = tmp_path / "7"
    with pytest.raises(InputError, match=f"{folder} was removed while a job ran in it"):
        probe(misbehaving_server, request("remove_its_folder"), folder)


def test_a_folder_that_cannot_be_made_is_told_as_such(misbehaving_server: JobServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        probe(misbehaving_server, request("behave"), tmp_path / "file" / "folder")


@pytest.mark.usefixtures("quick_start")
def test_a_process_with_many_open_files_can_run_jobs(tmp_path: Path) -> None:
    """A user's own process, which calls autotune's functions, may have more than select() can number."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        while stack.enter_context(open(os.devnull)).fileno() < 1100:  # noqa: PTH123
            pass
        with JobServer("cpu", jobs_module=MODULE) as server:
            assert probe(server, request("behave"), tmp_path / "1").ok
            worker = Worker(server)
            assert worker.run(Job.PROBE, request("behave"), tmp_path / "2").code == 0
            worker.close()
