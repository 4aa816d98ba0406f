"""The device properties that a null GPU reports, from the catalogue of GPUs and ``devices.yaml``."""

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

# A GPU given by its memory size alone has the other properties of this one.
_DEFAULT_GPU = "H100-SXM"
_PAGE_BYTES = 2 * MIB


@dataclass(frozen=True)
class NullDevice:
    """The properties of a null GPU as CUDA and NVML report them; sizes in bytes, clocks in kHz.

    Attributes:
        name: the name that CUDA and NVML report.
        total: the total of ``cudaMemGetInfo``.
        reserved: memory that the driver keeps; NVML's total is ``total + reserved``.
        context: memory of a process's CUDA context.
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


def null_device_names() -> tuple[str, ...]:
    """Return the names of the catalogue's GPUs that have a null GPU."""
    return tuple(_table()["devices"])


def has_null_device(gpu: Gpu) -> bool:
    """Return whether there is a null GPU for this GPU."""
    return gpu.memory_kind == "given" or gpu.name in _table()["devices"]


def null_device(word: str | int, memory_bytes: int | None = None) -> NullDevice:
    """Return the null GPU for a name such as ``H100-80GB`` or a size such as ``24GiB``.

    A size gives an H100 with that much memory.

    Args:
        memory_bytes: memory that CUDA can allocate, instead of the catalogue's.

    Raises:
        InputError: the catalogue has no such GPU, or it has no null GPU.
    """
    gpu = find_gpu(word)
    row = _row(gpu)
    catalogued = find_gpu(row["name"])
    if catalogued.compute_capability is None or catalogued.speeds is None:
        raise AssertionError(
            f"{catalogued.name} is in devices.yaml, and has no compute capability or no speeds in gpus.yaml"
        )
    major, minor = catalogued.compute_capability
    shared = _table()["compute_capabilities"][f"{major}.{minor}"]
    flops_per_clock = 2 * shared["fp32_cores"] * row["multiprocessors"]
    return NullDevice(
        name=row["cuda_name"],
        major=major,
        minor=minor,
        multiprocessors=row["multiprocessors"],
        threads_per_multiprocessor=shared["threads"],
        blocks_per_multiprocessor=shared["blocks"],
        clock_khz=round(catalogued.speeds.fp32 / flops_per_clock / 1e3),
        # Two bits per wire and clock.
        memory_clock_khz=round(catalogued.speeds.bandwidth * 8 / (2 * row["bus_bits"]) / 1e3),
        bus_bits=row["bus_bits"],
        l2_bytes=int(row["l2_mib"] * MIB),
        shared_per_multiprocessor=shared["shared_kib"] * KIB,
        shared_per_block=shared["shared_per_block_kib"] * KIB,
        total=gpu.memory_bytes if memory_bytes is None else memory_bytes,
        reserved=row["driver_mib"] * MIB - catalogued.memory_bytes,
        context=-(-gpu.context_bytes // _PAGE_BYTES) * _PAGE_BYTES,
    )


def _row(gpu: Gpu) -> Mapping[str, Any]:
    devices: Mapping[str, Mapping[str, Any]] = _table()["devices"]
    if gpu.memory_kind == "given":
        return devices[_DEFAULT_GPU]
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
