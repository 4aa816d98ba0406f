"""Describes the host memory that a training needs on each machine, and whether the machine has it, if known."""

from __future__ import annotations

from autotune.core.estimate import MemoryEstimate
from autotune.core.plan import Launch
from autotune.units import format_bytes


def lacks_host_memory(memory: MemoryEstimate, host_bytes: int | None) -> bool:
    """Return whether the processes of a machine may hold more on the host together than it has."""
    return host_bytes is not None and memory.host_need_bytes > host_bytes


def host_text(memory: MemoryEstimate, launch: Launch, host_bytes: int | None) -> str | None:
    """Return a sentence on the host's memory; None for a single process on a machine that has enough.

    Args:
        host_bytes: memory of the machine; None where it is not known.
    """
    lacking = lacks_host_memory(memory, host_bytes)
    if launch.processes == 1 and not lacking:
        return None
    each = launch.per_machine
    whose = "its process" if each == 1 else f"the {each} processes on it together"
    needed = f"needs up to {format_bytes(memory.host_need_bytes)} of host memory per machine, for {whose}"
    has = f"; this machine has {format_bytes(host_bytes)}" if host_bytes is not None else ""
    return f"It {needed}{has}: the most while the model is loaded, in a step, or while a checkpoint is saved."
