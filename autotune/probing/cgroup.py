"""Reads how many processes the kernel killed out of memory in the control groups of this process."""

from __future__ import annotations

from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def out_of_memory_kills() -> int:
    """Return the number of out-of-memory kills in this process's control group and those above it."""
    return counted_kills(_MEMBERSHIP, _ROOT)


def counted_kills(membership: Path, root: Path) -> int:
    """Return the out-of-memory kills that the control groups of a process count.

    It is the sum of the ``oom_kill`` lines of ``memory.events`` (cgroup v2) and ``memory.oom_control`` (v1). A group
    whose file cannot be read adds nothing. So an increase proves a kill, and no increase proves nothing.

    Args:
        membership: the file that lists the groups of this process (``/proc/self/cgroup``).
        root: where the control groups are mounted.
    """
    return sum(_oom_kills(file) for file in _counters(membership, root))


def _counters(membership: Path, root: Path) -> list[Path]:
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    files: list[Path] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mount, name = root, "memory.events"
        elif "memory" in controllers.split(","):
            mount, name = root / "memory", "memory.oom_control"
        else:
            continue
        # In a container the path may name a group that is not mounted; then the mount itself is the group.
        inner = mount / group.lstrip("/")
        files += [folder / name for folder in (inner, *inner.parents) if folder.is_relative_to(mount)]
    return files


def _oom_kills(file: Path) -> int:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
