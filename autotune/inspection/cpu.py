"""The CPU's name, and the cores and memory that this process may use, including control-group limits."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from autotune.core.machine import Hardware
from autotune.units import GIB, MIB

# How long a waiting thread spins before it sleeps: the standard's variable, GNU's, and LLVM's and Intel's.
_SPIN_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# Cache sizes of oneDNN, which compiles code for each matrix shape, and of ideep, PyTorch's interface to it.
_CACHE_VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_CACHE_SIZE = "32"
# mallopt(3): glibc's malloc maps larger blocks one by one, and the kernel fills their pages with zeros. 32 MiB is the
# maximum. Setting either variable ends the automatic adjustment of both.
_MMAP_THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB)}
# The free memory at the end of its heap from which malloc returns it to the kernel: more than any machine has.
_TRIM_THRESHOLD = {"MALLOC_TRIM_THRESHOLD_": str(1024 * GIB)}
_DEFAULTS = dict.fromkeys(_CACHE_VARIABLES, _CACHE_SIZE) | _MMAP_THRESHOLD | _TRIM_THRESHOLD


@dataclass(frozen=True)
class Limits:
    """The tightest limits that control groups set for this process; infinite without a limit.

    Attributes:
        memory_bytes: memory limit.
        memory_left_bytes: memory left under a limit.
        cores: CPU quota, in cores.
    """

    memory_bytes: float = math.inf
    memory_left_bytes: float = math.inf
    cores: float = math.inf


def cpu(root: Path = Path("/")) -> Hardware:
    """Return the CPU as the kernel reports it.

    Memory counted in ``used_by_others_bytes`` cannot be allocated without swapping.

    Args:
        root: directory with ``proc`` and ``sys``.
    """
    import psutil

    memory = psutil.virtual_memory()
    limits = control_group_limits(root)
    total_bytes = int(min(memory.total, limits.memory_bytes))
    return Hardware(
        kind="cpu",
        name=_cpu_name(root),
        memory_bytes=total_bytes,
        used_by_others_bytes=total_bytes - int(min(total_bytes, memory.available, limits.memory_left_bytes)),
        cores=int(min(len(core_numbers(root)), openmp_threads())),
        variables=" ".join(f"{name}={value}" for name, value in cpu_variables().items()),
    )


def machine_id(root: Path = Path("/")) -> str:
    """Return what tells this machine from others that share a home directory: its id (machine-id(5)), or its name.

    Args:
        root: directory with ``etc``.
    """
    with suppress(OSError):
        if found := (root / "etc/machine-id").read_text(encoding="ascii").strip():
            return found
    return platform.node()


def core_numbers(root: Path) -> tuple[int, ...]:
    """Return the numbers of the CPUs that this process may use, at least one; hyper-threads of one core are adjacent.

    A CPU quota limits their number.

    Args:
        root: directory with ``proc`` and ``sys``.
    """
    allowed = os.sched_getaffinity(0)
    count = max(1, int(min(len(allowed), control_group_limits(root).cores)))
    return tuple(sorted(allowed, key=partial(_core_sort_key, root))[:count])


def _core_sort_key(root: Path, number: int) -> tuple[int, int, int]:
    """Return a sort key of a CPU: its package, its physical core, and its own number."""
    topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
    package, core = (_number(topology / name) for name in ("physical_package_id", "core_id"))
    return (package or 0, number if core is None else core, number)


def openmp_threads() -> float:
    """Return the threads that OMP_NUM_THREADS allows (OpenMP 5.2, section 21.2.1), or infinity."""
    threads = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(threads) if threads.isdigit() and int(threads) > 0 else math.inf


def cpu_variables() -> dict[str, str]:
    """Return the environment variables of a training on a CPU; values that the user has set are kept.

    Waiting threads sleep instead of spinning: if other programs run, a spinning thread may occupy the core of the
    thread that it waits for. GNU's OpenMP runtime, which torch's Linux wheels include, and LLVM's and Intel's read
    OMP_WAIT_POLICY when they are loaded.

    The caches of compiled code are small. With the default size, 1,024, the memory of a bfloat16 training grows with
    each new row length (640 MiB in 1,000 lengths for 128 x 128 weights), long after a probe has ended. With 32, steps
    of a model of 3 layers with rows of up to 1,723 tokens took the same processor time as with 1,024, within 2 %.

    malloc keeps the memory that a step frees. By default it returns what happens to be free at the end of its heap, and
    the next step waits for new pages: 5,900 to 37,000 in steps of the small example (docs/probing.md).
    """
    given = {name: "".join(os.environ.get(name, "").split()) for name in (*_SPIN_VARIABLES, *_DEFAULTS)}
    waiting = {name: given[name] for name in _SPIN_VARIABLES if given[name]} or {"OMP_WAIT_POLICY": "PASSIVE"}
    return waiting | {name: given[name] or default for name, default in _DEFAULTS.items()}


def control_group_limits(root: Path) -> Limits:
    """Return the tightest limits of all control groups of this process, version 1 and 2.

    Args:
        root: directory with ``proc`` and ``sys``.
    """
    memory: list[tuple[int, int]] = []
    cores: list[float] = []
    for controllers, group in control_groups(root):
        version_1 = "memory" in controllers
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version_1 else ("memory.max", "memory.current")
        limit, used = (_number(group / name) for name in names)
        if limit is not None and used is not None:
            memory.append((limit, max(0, limit - used + _reclaimable_bytes(group / "memory.stat"))))
        cores.append(_quota(group))
    return Limits(
        memory_bytes=min((limit for limit, _ in memory), default=math.inf),
        memory_left_bytes=min((left for _, left in memory), default=math.inf),
        cores=min(cores, default=math.inf),
    )


def control_groups(root: Path) -> Iterator[tuple[frozenset[str], Path]]:
    """Yield the controllers and the folder of each control group of this process, ancestors included.

    In a container, ``/proc/self/cgroup`` may name the host's folder: then only the root of the mount exists, which is
    the container's own group.
    """
    listing = root / "proc/self/cgroup"
    if not listing.is_file():
        return
    for line in listing.read_text(encoding="utf-8").splitlines():
        _, names, path = line.split(":", 2)
        controllers = frozenset(filter(None, names.split(",")))
        mounts = [names, *sorted(controllers)] if controllers else ["", "unified"]
        for mount in dict.fromkeys(mounts):
            top = root / "sys/fs/cgroup" / mount
            folder = top / path.lstrip("/")
            for group in (folder, *folder.parents):
                if group.is_dir():
                    yield controllers, group
                if group == top:
                    break


def out_of_memory_kills(root: Path = Path("/")) -> int:
    """Return the number of out-of-memory kills in this process's control group and its ancestors.

    It is the sum of the ``oom_kill`` lines of ``memory.events`` (cgroup v2) and ``memory.oom_control`` (v1). An
    unreadable file counts as 0. So an increase proves a kill, but no increase does not exclude one.

    Args:
        root: directory with ``proc`` and ``sys``.
    """
    return sum(
        _oom_kills(group / ("memory.oom_control" if "memory" in controllers else "memory.events"))
        for controllers, group in control_groups(root)
    )


def _oom_kills(file: Path) -> int:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _quota(group: Path) -> float:
    both = _words(group / "cpu.max") or [*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us")]
    if len(both) != 2 or not both[0].isdigit():  # "max" in version 2 and -1 in version 1 mean no limit
        return math.inf
    return int(both[0]) / int(both[1])


def _reclaimable_bytes(file: Path) -> int:
    """Return the inactive page cache of a group, which its memory usage includes and the kernel reclaims on demand.

    Kubernetes subtracts it as well, for a container's working set.
    """
    words = _words(file)
    values = dict(zip(words[::2], words[1::2], strict=False))
    return int(values.get("total_inactive_file", values.get("inactive_file", "0")))


def _number(file: Path) -> int | None:
    words = _words(file)
    return int(words[0]) if words and words[0].isdigit() else None


def _words(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").split() if file.is_file() else []


def _cpu_name(root: Path) -> str:
    listing = root / "proc/cpuinfo"
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
