"""Describes the host memory that a training needs on each machine, and whether the machine has it, if known."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.core.estimate import MemoryEstimate
from autotune.core.plan import Launch
from autotune.units import format_bytes


def lacks_host_memory(memory: MemoryEstimate, host_bytes: int | None) -> bool:
    """Return whether the processes of a machine may hold more on the host together than it has."""
    return host_bytes is not None and memory.host_need_bytes > host_bytes


def host_notes(memory: MemoryEstimate | None, launch: Launch, host_bytes: int | None) -> Iterator[str]:
    """Yield a sentence on the host's memory, unless a single process is on a machine that has enough.

    Args:
        memory: None where it is not known; nothing is then yielded.
        host_bytes: memory of the machine; None where it is not known.
    """
    if memory is None or (launch.processes == 1 and not lacks_host_memory(memory, host_bytes)):
        return
    each = launch.per_machine
    whose = "its process" if each == 1 else f"the {each} processes on it together"
    needed = f"needs up to {format_bytes(memory.host_need_bytes)} of host memory per machine, for {whose}"
    has = f"; this machine has {format_bytes(host_bytes)}" if host_bytes is not None else ""
    yield f"It {needed}{has}: the most while the model is loaded, in a step, or while a checkpoint is saved."
