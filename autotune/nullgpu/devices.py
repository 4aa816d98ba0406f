"""The figures that a null GPU reports, from the catalogue of GPUs and ``devices.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from autotune.core.gpu import Gpu
from autotune.errors import InputError
from autotune.inspection.gpus import find_gpu
from autotune.units import KIB, MIB

# Stands for a GPU that is given by its size alone.
_OTHERWISE = "H100-SXM"
_PAGE_BYTES = 2 * MIB


@dataclass(frozen=True)
class NullDevice:
    """The properties of a null GPU as CUDA and NVML report them; sizes in bytes, clocks in kHz.

    Attributes:
        name: the name that CUDA and NVML report.
        total: what ``cudaMemGetInfo`` calls total.
        reserved: what the driver keeps of the card for itself; NVML's total is both together.
        context: what a process holds as soon as it uses the device.
    """

    name: str
    major: int
    minor: int
    multiprocessors: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    clock_khz: int
    memory_clock_khz: int
    bus_bits: int
    l2_bytes: int
    shared_per_multiprocessor: int
    shared_per_block: int
    total: int
    reserved: int
    context: int

    def text(self) -> str:
        """Return the value of ``NULLGPU_DEVICE``, which ``shim/settings.cpp`` reads."""
        return ";".join(f"{name}={value}" for name, value in asdict(self).items())


def listed() -> tuple[str, ...]:
    """Return the names of the GPUs of the catalogue that can be stood in for."""
    return tuple(_table()["devices"])


def has_null_device(gpu: Gpu) -> bool:
    """Return whether a null GPU can stand in for a GPU."""
    return gpu.memory_kind == "given" or gpu.name in _table()["devices"]


def null_device(word: str | int, memory_bytes: int | None = None) -> NullDevice:
    """Return the null GPU for a name such as ``H100-80GB`` or a size such as ``24GiB``.

    A size means a device with that much memory, which is in all else an H100.

    Args:
        memory_bytes: memory that CUDA can allocate, instead of the catalogue's.

    Raises:
        InputError: there is no such GPU, or it cannot be stood in for.
    """
    gpu = find_gpu(word)
    row = _row(gpu)
    known = find_gpu(row["name"])
    if known.compute_capability is None or known.speeds is None:
        raise AssertionError(
            f"{known.name} is in devices.yaml, and has no compute capability or no speeds in gpus.yaml"
        )
    major, minor = known.compute_capability
    shared = _table()["compute_capabilities"][f"{major}.{minor}"]
    flops_per_clock = 2 * shared["fp32_cores"] * row["multiprocessors"]
    return NullDevice(
        name=row["cuda_name"],
        major=major,
        minor=minor,
        multiprocessors=row["multiprocessors"],
        threads_per_multiprocessor=shared["threads"],
        blocks_per_multiprocessor=shared["blocks"],
        clock_khz=round(known.speeds.fp32 / flops_per_clock / 1e3),
        # Two bits per wire and clock.
        memory_clock_khz=round(known.speeds.bandwidth * 8 / (2 * row["bus_bits"]) / 1e3),
        bus_bits=row["bus_bits"],
        l2_bytes=int(row["l2_mib"] * MIB),
        shared_per_multiprocessor=shared["shared_kib"] * KIB,
        shared_per_block=shared["shared_per_block_kib"] * KIB,
        total=gpu.memory_bytes if memory_bytes is None else memory_bytes,
        reserved=row["driver_mib"] * MIB - known.memory_bytes,
        context=-(-gpu.context_bytes // _PAGE_BYTES) * _PAGE_BYTES,
    )


def _row(gpu: Gpu) -> Mapping[str, Any]:
    devices: Mapping[str, Mapping[str, Any]] = _table()["devices"]
    if gpu.memory_kind == "given":
        return devices[_OTHERWISE]
    if gpu.name not in devices:
        raise InputError(
            f"There is no null GPU for {gpu.name}.",
            hint=f"There are {', '.join(devices)}. A size such as 24GiB works too.",
        )
    return devices[gpu.name]


@cache
def _table() -> Mapping[str, Any]:
    text = files("autotune.nullgpu").joinpath("devices.yaml").read_text(encoding="utf-8")
    table = yaml.safe_load(text)
    return {**table, "devices": {row["name"]: row for row in table["devices"]}}
