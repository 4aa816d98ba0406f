"""A machine: its device and memory, the number of training processes, and the installed software."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autotune.core.gpu import Gpu
from autotune.core.plan import Launch

DeviceKind = Literal["cuda", "cpu"]

GPUS_PER_MACHINE = 8
"""The most GPUs of a usual machine, as clouds rent them and NVIDIA builds them (HGX, DGX)."""
NULL_DRIVER = "0.0-nullgpu"
"""The driver version that a null GPU reports (``autotune/nullgpu/shim/nvml.cpp``)."""


@dataclass(frozen=True)
class Hardware:
    """The device that a process trains on, and the number of processes.

    Attributes:
        kind: ``cuda`` or ``cpu``.
        name: the vendor's name of the device.
        memory_bytes: the device's memory; for a CPU the memory that this process may use (cgroup limit included).
        used_by_others_bytes: memory of the device that other processes use.
        compute_capability: CUDA's (major, minor), or None.
        processes: number of training processes to launch, over all machines.
        machines: number of machines, with equally many processes on each.
        cores: number of CPU cores that this process may use.
        driver: version of the device's driver, or None.
        variables: environment variables of a training, as a shell sets them: on a CPU such as
            ``OMP_WAIT_POLICY=PASSIVE``, on a machine with different GPUs the order of their numbers; else empty.
    """

    kind: DeviceKind
    name: str
    memory_bytes: int
    used_by_others_bytes: int = 0
    compute_capability: tuple[int, int] | None = None
    processes: int = 1
    cores: int = 1
    driver: str | None = None
    machines: int = 1
    variables: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """``variables`` by name."""
        return dict(pair.split("=", 1) for pair in self.variables.split())

    @property
    def is_null(self) -> bool:
        """Whether it is a null GPU, whose kernels do nothing: memory is real, and times mean nothing."""
        return self.driver == NULL_DRIVER

    @property
    def threads(self) -> int:
        """CPU threads of one training process, in probes and in the bundle alike."""
        return max(1, self.cores // self.launch.per_machine)

    @property
    def launch(self) -> Launch:
        """How the processes of a training on it are started."""
        return Launch(self.processes, self.machines)

    @property
    def available_bytes(self) -> int:
        """Memory that other processes do not use."""
        return max(0, self.memory_bytes - self.used_by_others_bytes)


@dataclass(frozen=True)
class Share:
    """The GPUs or CPU cores of a machine that the processes of one worker use.

    Attributes:
        gpus: their CUDA_VISIBLE_DEVICES, or None to leave that variable unchanged.
        cores: the kernel's numbers of their CPUs; empty: all that this process may use.
    """

    gpus: str | None = None
    cores: tuple[int, ...] = ()


WHOLE = Share()
"""All of a machine that this process may use."""


@dataclass(frozen=True)
class Machine:
    """Hardware and installed software, which determine the available choices.

    Attributes:
        packages: versions of the relevant installed distributions, by name.
        device_reason: why no usable GPU was found, for messages; else empty.
        planned: whether nothing runs on it, so that packages that no trace needs may be missing.
        gpu: the planned GPU with its speeds; None for a CPU, or if not planned.
        host_bytes: host memory of this machine, if the planned GPU is its own; else None.
    """

    hardware: Hardware
    packages: Mapping[str, str] = field(default_factory=dict)
    device_reason: str = ""
    planned: bool = False
    gpu: Gpu | None = None
    host_bytes: int | None = None

    @property
    def device(self) -> Gpu:
        """The device, a CPU included."""
        return self.gpu or Gpu(self.hardware.name, self.hardware.memory_bytes, "usable", "", 0)
