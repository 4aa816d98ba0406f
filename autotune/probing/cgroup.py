"""What the kernel counts of processes that it killed for want of memory, in the control groups of this process."""

from __future__ import annotations

from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def out_of_memory_kills() -> int:
    """Return a count that rises when a process of this process's control group, or of one above it, is killed so."""
    return counted_kills(_MEMBERSHIP, _ROOT)


def counted_kills(membership: Path, root: Path) -> int:
    """Return the kills that the control groups of a process count.

    It is the sum of the ``oom_kill`` lines of ``memory.events`` (cgroup v2) and ``memory.oom_control`` (v1). A group
    whose file cannot be read adds nothing, so a rise is evidence and no rise is none.

    Args:
        membership: the file that says which groups this process is in (``/proc/self/cgroup``).
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
        # In a container the path may name a group outside of what is mounted; then the mount is the group itself.
        inner = mount / group.lstrip("/")
        files += [folder / name for folder in (inner, *inner.parents) if folder.is_relative_to(mount)]
    return files


def _oom_kills(file: Path) -> int:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
