"""A kill by signal 9 counts as out of memory only if the kernel's own counters show it."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.machine import DeviceKind
from autotune.core.status import ProbeStatus
from autotune.inspection.cpu import out_of_memory_kills
from autotune.probing.jobs import classify
from autotune.probing.server import JobExit

KILLED = JobExit(wall_seconds=3.0, signal=signal.SIGKILL)
ENDED = JobExit(wall_seconds=3.0, code=1)


@pytest.mark.parametrize(
    ("ending", "kills", "status"),
    [
        (KILLED, 1, ProbeStatus.HOST_OUT_OF_MEMORY),
        (KILLED, 0, ProbeStatus.CRASHED),
        (JobExit(wall_seconds=3.0, server_died=True), 1, ProbeStatus.HOST_OUT_OF_MEMORY),
        (JobExit(wall_seconds=3.0, server_died=True), 0, ProbeStatus.CRASHED),
        (JobExit(wall_seconds=3.0, signal=signal.SIGSEGV), 1, ProbeStatus.CRASHED),
        (JobExit(wall_seconds=3.0, signal=signal.SIGKILL, timed_out=True), 1, ProbeStatus.TIMEOUT),
    ],
)
def test_host_out_of_memory_needs_a_rise_of_the_kernels_count(ending: JobExit, kills: int, status: ProbeStatus) -> None:
    ending = replace(ending, oom_kills=kills)
    found = classify(ending, "reply.json is absent", [], device="cuda", limit_bytes=None)
    assert found.status is status
    assert found.unexplained is (status is ProbeStatus.CRASHED and ending.signal != signal.SIGSEGV)


def test_a_library_that_exits_when_cuda_refuses_memory_is_out_of_memory() -> None:
    log = ["Error out of memory at line 85 in file /src/csrc/pythonInterface.cpp", "some more"]
    ended = classify(ENDED, "reply.json is absent", log, device="cuda", limit_bytes=None)
    assert ended.status is ProbeStatus.OUT_OF_MEMORY
    assert log[0] in ended.reason


@pytest.mark.parametrize(
    ("device", "limit_bytes", "status"),
    [
        ("cuda", 2**30, ProbeStatus.HOST_OUT_OF_MEMORY),
        ("cuda", None, ProbeStatus.HOST_OUT_OF_MEMORY),
        ("cpu", 2**30, ProbeStatus.OUT_OF_MEMORY),
        ("cpu", None, ProbeStatus.CRASHED),
    ],
)
def test_an_allocation_on_the_host_that_ends_the_process_is_of_the_device_on_a_cpu_alone(
    device: DeviceKind, limit_bytes: int | None, status: ProbeStatus
) -> None:
    log = ["terminate called after throwing an instance of 'std::bad_alloc'"]
    ended = classify(ENDED, "reply.json is absent", log, device=device, limit_bytes=limit_bytes)
    assert (ended.status, log[0] in ended.reason) == (status, True)


def test_kills_are_counted_in_this_group_and_those_above_it_under_cgroup_v2(tmp_path: Path) -> None:
    root = tmp_path / "sys" / "fs" / "cgroup"
    _write(tmp_path / "proc" / "self" / "cgroup", "0::/user/job\n")
    _write(root / "memory.events", "low 0\noom 5\noom_kill 1\noom_group_kill 7\n")
    _write(root / "user" / "job" / "memory.events", "oom_kill 2\n")
    assert out_of_memory_kills(tmp_path) == 3


def test_kills_are_counted_under_cgroup_v1(tmp_path: Path) -> None:
    root = tmp_path / "sys" / "fs" / "cgroup"
    _write(tmp_path / "proc" / "self" / "cgroup", "5:freezer:/\n4:memory,hugetlb:/job\n0::/\n")
    _write(root / "memory" / "job" / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert out_of_memory_kills(tmp_path) == 4


def test_where_no_group_can_be_read_there_is_no_evidence(tmp_path: Path) -> None:
    assert out_of_memory_kills(tmp_path) == 0


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
