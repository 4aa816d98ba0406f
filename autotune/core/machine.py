"""The machine: devices with their memory, and the versions of the software that is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

DeviceKind = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Hardware:
    """One device that a process trains on, and how many of them there are.

    Attributes:
        kind: ``cuda`` or ``cpu``.
        name: the vendor's name of the device.
        memory_bytes: the device's memory; for a CPU the memory that this process may use (cgroup limit included).
        used_by_others_bytes: what other processes hold of it already.
        compute_capability: CUDA's (major, minor), or None.
        processes: how many training processes are launched.
        cores: CPU cores that this process may use.
        driver: version of the device's driver, or None.
    """

    kind: DeviceKind
    name: str
    memory_bytes: int
    used_by_others_bytes: int = 0
    compute_capability: tuple[int, int] | None = None
    processes: int = 1
    cores: int = 1
    driver: str | None = None

    @property
    def threads(self) -> int:
        """CPU threads of one training process; probes and what is handed over use the same."""
        return max(1, self.cores // self.processes)

    @property
    def available_bytes(self) -> int:
        """Memory that is not held by others."""
        return max(0, self.memory_bytes - self.used_by_others_bytes)


@dataclass(frozen=True)
class Machine:
    """Hardware and software together: what decides whether a choice is possible at all.

    Attributes:
        packages: installed distributions that matter, by name, to their version; absent when not installed.
        device_reason: why ``hardware.kind`` is not the better device, when it is not (for messages), else empty.
    """

    hardware: Hardware
    packages: Mapping[str, str] = field(default_factory=dict)
    device_reason: str = ""
