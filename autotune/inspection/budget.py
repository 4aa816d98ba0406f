"""Determines the memory budget of candidates."""

from __future__ import annotations

from autotune.core.machine import Hardware
from autotune.errors import InputError
from autotune.units import MIB, format_bytes, parse_size


def memory_budget(asked: str | int | None, hardware: Hardware) -> int:
    """Return the memory budget in bytes: as requested, or all device memory that other processes do not use.

    Args:
        asked: a size such as ``24GiB``, a number of bytes, or None.
        hardware: the device.

    Raises:
        InputError: it is not a size or is larger than the device, or no device memory is left.
    """
    if asked is None:
        if hardware.available_bytes == 0:
            raise InputError(
                f"Others use all {format_bytes(hardware.memory_bytes)} of {hardware.name}.",
                hint="End what uses it, or take another device.",
            )
        return hardware.available_bytes
    budget_bytes = parse_size(asked) if isinstance(asked, str) else asked
    # Somebody who writes 24 means GiB.
    if budget_bytes < MIB:
        raise InputError(f"A memory budget of {budget_bytes} bytes holds nothing.", hint="Write for instance 24GiB.")
    if budget_bytes > hardware.memory_bytes:
        shared = hardware.kind == "cpu" and hardware.processes > 1
        each = f" for each of {hardware.processes} processes" if shared else ""
        raise InputError(
            f"A memory budget of {format_bytes(budget_bytes)} is larger than {hardware.name},"
            f" which has {format_bytes(hardware.memory_bytes)}{each}.",
            hint="Give a smaller one, or none for all that is free.",
        )
    return budget_bytes
