"""The CPU within control groups of version 1 and 2, and the environment variables for training on it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from math import inf
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from autotune.inspection.cpu import Limits, control_group_limits, core_numbers, cpu, cpu_variables, machine_id
from autotune.units import GIB, MIB

CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB), "MALLOC_TRIM_THRESHOLD_": str(1024 * GIB)}


def tree(root: Path, files: Mapping[str, object]) -> Path:
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return root


def test_a_machine_is_known_by_its_id_or_else_by_its_name(tmp_path: Path) -> None:
    assert machine_id(tmp_path) == platform.node()
    assert machine_id(tree(tmp_path, {"etc/machine-id": ""})) == platform.node()
    assert machine_id(tree(tmp_path, {"etc/machine-id": "0123abcd"})) == "0123abcd"


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert control_group_limits(tmp_path) == Limits()


def test_version_2_limits_are_read(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/slice/job"
    files = {
        "proc/self/cgroup": "0::/slice/job",
        f"{group}/memory.max": 8 * GIB,
        f"{group}/memory.current": 3 * GIB,
        f"{group}/memory.stat": f"anon {2 * GIB}\ninactive_file {GIB}",
        f"{group}/cpu.max": "150000 100000",
    }
    assert control_group_limits(tree(tmp_path, files)) == Limits(8 * GIB, 6 * GIB, 1.5)


def test_the_tightest_ancestor_decides(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slice/job",
        "sys/fs/cgroup/slice/memory.max": 2 * GIB,
        "sys/fs/cgroup/slice/memory.current": GIB,
        "sys/fs/cgroup/slice/job/memory.max": "max",
        "sys/fs/cgroup/slice/job/memory.current": GIB,
        "sys/fs/cgroup/slice/job/cpu.max": "max 100000",
        "sys/fs/cgroup/slice/cpu.max": "200000 100000",
    }
    assert control_group_limits(tree(tmp_path, files)) == Limits(2 * GIB, GIB, 2.0)


def test_version_1_limits_are_read(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n1:name=systemd:/",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 4 * GIB,
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": GIB,
        "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {512 * MIB}",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": 300000,
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": 100000,
    }
    assert control_group_limits(tree(tmp_path, files)) == Limits(4 * GIB, 3 * GIB + 512 * MIB, 3.0)


def test_version_1_says_minus_one_where_there_is_no_quota(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "1:cpu:/",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": -1,
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000,
    }
    assert control_group_limits(tree(tmp_path, files)).cores == inf


def test_in_a_container_the_mounts_root_is_the_own_group(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/0123456789",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": GIB,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 0,
    }
    assert control_group_limits(tree(tmp_path, files)).memory_bytes == GIB


def test_a_limit_makes_the_cpu_smaller_and_what_it_leaves_is_what_is_available(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Test CPU\n",
        "sys/fs/cgroup/memory.max": 64 * MIB,
        "sys/fs/cgroup/memory.current": 16 * MIB,
        "sys/fs/cgroup/cpu.max": "50000 100000",
    }
    found = cpu(tree(tmp_path, files))
    assert (found.name, found.cores) == ("Test CPU", 1)
    assert (found.memory_bytes, found.available_bytes) == (64 * MIB, 48 * MIB)


def test_a_limit_above_the_machines_memory_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Version 1's value for "no limit".
    files = {
        "proc/self/cgroup": "1:memory:/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 0x7FFFFFFFFFFFF000,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 0,
    }
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    found = cpu(tree(tmp_path, files))
    assert (found.memory_bytes, found.available_bytes) == (memory.total, memory.available)


def test_a_cpu_without_a_model_name_is_called_by_its_architecture(tmp_path: Path) -> None:
    assert cpu(tmp_path).name


def test_threads_of_one_core_stand_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3, 5})
    cores = {0: (0, 0), 1: (0, 1), 2: (0, 0), 3: (0, 1), 5: (1, 0)}
    topology = "sys/devices/system/cpu/cpu{}/topology"
    files = {f"{topology.format(number)}/physical_package_id": place[0] for number, place in cores.items()}
    files |= {f"{topology.format(number)}/core_id": place[1] for number, place in cores.items()}
    assert core_numbers(tree(tmp_path, files)) == (0, 2, 1, 3, 5)
    assert core_numbers(tmp_path / "nothing is told") == (0, 1, 2, 3, 5)


def test_under_a_quota_there_are_as_many_cores_as_it_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    group = "sys/fs/cgroup/job"
    root = tree(tmp_path, {"proc/self/cgroup": "0::/job", f"{group}/cpu.max": "250000 100000"})
    assert core_numbers(root) == (0, 1)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"OMP_WAIT_POLICY": "PASSIVE"}),
        ({"OMP_WAIT_POLICY": " active "}, {"OMP_WAIT_POLICY": "active"}),
        ({"GOMP_SPINCOUNT": "1000"}, {"GOMP_SPINCOUNT": "1000"}),
        ({"OMP_WAIT_POLICY": "", "KMP_BLOCKTIME": "1"}, {"KMP_BLOCKTIME": "1"}),
    ],
    ids=str,
)
def test_threads_wait_idly_unless_the_user_has_said_how(
    own: Mapping[str, str], expected: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", *CACHES, *MALLOC):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert cpu_variables() == cpu(tmp_path).environment == {**expected, **dict.fromkeys(CACHES, "32"), **MALLOC}


def number_printed_by(code: str) -> int:
    """Return the number that a process with the variables of a training on a CPU prints."""
    run = [sys.executable, "-c", dedent(code)]
    ended = subprocess.run(run, env=os.environ | cpu_variables(), capture_output=True, text=True, check=True)
    return int(ended.stdout)


GROWN = """
    import torch
    from pathlib import Path

    def resident():
        return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("RssAnon"))

    weights = torch.ones(128, 128, dtype=torch.bfloat16)
    for length in range(1, 401):
        torch.ones(length, 128, dtype=torch.bfloat16) @ weights
        if length == 100:
            before = resident()
    print(resident() - before)
"""


def test_memory_does_not_grow_with_every_new_length_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does without the variables, where the CPU has instructions for bfloat16: by 190 MiB."""
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    assert number_printed_by(GROWN) < 20 * 1024


FAULTS = """
    import resource
    import torch

    def step():
        grown = torch.zeros(1)
        for _ in range(7):
            grown = torch.cat([grown, torch.ones(2**20)])

    def faults():
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    for _ in range(5):
        step()
    before = faults()
    for _ in range(10):
        step()
    print(faults() - before)
"""


def test_the_kernel_fills_no_memory_anew_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables it fills 150,000 pages in these ten steps."""
    for name in MALLOC:
        monkeypatch.delenv(name, raising=False)
    assert number_printed_by(FAULTS) < 15_000


@pytest.mark.parametrize("name", ["LRU_CACHE_CAPACITY", "MALLOC_TRIM_THRESHOLD_"])
def test_a_value_that_the_user_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "512")
    assert cpu_variables()[name] == "512"
