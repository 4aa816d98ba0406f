"""Inspects the machine that training runs on: its device, free memory, and installed software."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from autotune.core.machine import Hardware, Machine
from autotune.errors import InputError
from autotune.inspection.cpu import cpu
from autotune.inspection.cuda import NoGpuError, visible_gpus
from autotune.inspection.software import check_required, installed_packages, torch_cuda_version


def machine(device: Literal["auto", "cuda", "cpu"] = "auto", processes: int | None = None) -> Machine:
    """Return this machine, with the device asked for; ``auto`` takes a GPU where torch can use one.

    Args:
        processes: how many train together, each on a GPU of its own, or with an equal share of a CPU's memory; None:
            one on each visible GPU, or one on a CPU.

    Raises:
        InputError: required software is missing or too old, or GPUs were asked for that cannot be used.
    """
    packages = installed_packages()
    check_required(packages)
    host = cpu()
    if device == "cpu":
        return Machine(_shared_out(host, processes), packages, "the CPU was asked for")
    try:
        gpus = visible_gpus()
        if torch_cuda_version() is None:
            raise NoGpuError(f"{gpus[0].name} is there, but torch {packages['torch']} is not built for CUDA")
    except NoGpuError as error:
        if device == "cuda":
            raise InputError(
                f"Device 'cuda' cannot be used: {error}.", hint="Use --device cpu, or install what is missing."
            ) from error
        return Machine(_shared_out(host, processes), packages, str(error))
    return Machine(replace(_joined(gpus, processes), cores=host.cores), packages)


def _shared_out(host: Hardware, processes: int | None) -> Hardware:
    """Return a CPU of which each process gets an equal share of the memory."""
    count = processes or 1
    memory, used = host.memory_bytes // count, host.used_by_others_bytes // count
    return replace(host, processes=count, memory_bytes=memory, used_by_others_bytes=used)


def _joined(gpus: Sequence[Hardware], processes: int | None) -> Hardware:
    """Return the first GPUs as one description: each process may need as much as the one with the least memory left.

    Raises:
        InputError: there are fewer than that.
    """
    count = processes or len(gpus)
    if count > len(gpus):
        visible = "1 GPU is visible" if len(gpus) == 1 else f"{len(gpus)} GPUs are visible"
        raise InputError(f"{count} processes need {count} GPUs, and {visible}.", hint="Give fewer --num-processes.")
    tightest = min(gpus[:count], key=lambda gpu: gpu.available_bytes)
    return replace(tightest, processes=count)


def environment(machine: Machine) -> dict[str, str]:
    """Return the versions of the software that figures are measured with: packages, Python, and the driver."""
    versions = {"python": platform.python_version(), **machine.packages}
    if machine.hardware.driver is not None:
        versions["driver"] = machine.hardware.driver
    return versions
