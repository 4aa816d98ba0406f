"""Inspects the machine that training runs on: its device, free memory, and installed software."""

from __future__ import annotations

import platform
from dataclasses import replace
from typing import Literal

from autotune.core.machine import Machine
from autotune.errors import InputError
from autotune.inspection.cpu import cpu
from autotune.inspection.cuda import NoGpuError, first_gpu
from autotune.inspection.software import check_required, installed_packages, torch_cuda_version


def machine(device: Literal["auto", "cuda", "cpu"] = "auto") -> Machine:
    """Return this machine, with the device asked for; ``auto`` takes a GPU where torch can use one.

    Raises:
        InputError: required software is missing or too old, or a GPU was asked for that cannot be used.
    """
    packages = installed_packages()
    check_required(packages)
    host = cpu()
    if device == "cpu":
        return Machine(hardware=host, packages=packages, device_reason="the CPU was asked for")
    try:
        gpu = first_gpu()
        if torch_cuda_version() is None:
            raise NoGpuError(f"{gpu.name} is there, but torch {packages['torch']} is not built for CUDA")
    except NoGpuError as error:
        if device == "cuda":
            raise InputError(
                f"Device 'cuda' cannot be used: {error}.", hint="Use --device cpu, or install what is missing."
            ) from error
        return Machine(hardware=host, packages=packages, device_reason=str(error))
    return Machine(hardware=replace(gpu, cores=host.cores), packages=packages)


def environment(machine: Machine) -> dict[str, str]:
    """Return the versions of the software that figures are measured with: packages, Python, and the driver."""
    versions = {"python": platform.python_version(), **machine.packages}
    if machine.hardware.driver is not None:
        versions["driver"] = machine.hardware.driver
    return versions
