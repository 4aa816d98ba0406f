"""Inspects the machine that training runs on: its device, the memory budget, and installed software."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from autotune.core.machine import WHOLE, Hardware, Machine, Share
from autotune.errors import InputError
from autotune.inspection.cpu import core_numbers, cpu
from autotune.inspection.cuda import NoGpuError, hides_gpus, nvidia_cards, visible_gpus, visible_words
from autotune.inspection.software import check_required, installed_packages, torch_builds, torch_cuda_version
from autotune.units import MIB, format_bytes, parse_size, plural

Workers = int | Literal["auto"]
"""Number of workers that probe at the same time; ``auto``: as many as the GPUs allow, or one on a CPU."""
_ON_CPU = "Repair the driver or torch, or measure on the CPU with --device cpu."
_OTHER_BUILDS = {"hip": "ROCm", "xpu": "Intel GPUs"}


def machine(
    device: Literal["auto", "cuda", "cpu"] = "auto", processes: int | None = None, visible: str | None = None
) -> Machine:
    """Return this machine with the requested device; ``auto``: a GPU if torch can use one, else the CPU.

    Args:
        processes: processes that train together, each on a GPU of its own, or with an equal share of a CPU's memory;
            None: one on each visible GPU, or one on a CPU.
        visible: their ``CUDA_VISIBLE_DEVICES``; None: that of this process.

    Raises:
        InputError: required software is missing or has an unsupported version, or the GPUs cannot be used.
    """
    return _divided(device, processes, None, visible)[0]


def divide_among_workers(
    device: Literal["auto", "cuda", "cpu"], processes: int | None, workers: Workers | None
) -> tuple[Machine, tuple[Share, ...]]:
    """Return the machine of one worker that measures, and the shares of all workers of this machine.

    Args:
        processes: processes that train together; None: one if there are workers, else as in :func:`machine`.
        workers: number of workers; None: a single one with the whole machine.

    Raises:
        InputError: as in :func:`machine`; there are too few GPUs or cores, or the GPUs differ; or ``auto`` would
            measure on the CPU of a machine with a GPU that cannot be used, which takes hours.
    """
    found, shares = _divided(device, processes, workers)
    unusable = _unusable_gpu(found.device_reason) if device == "auto" and found.device_reason else ""
    if unusable:
        raise InputError(unusable, hint=_ON_CPU)
    return found, shares


def _unusable_gpu(reason: str) -> str:
    """Return in a sentence why a machine's GPU cannot be used; empty if there is none, or it is hidden on purpose.

    Args:
        reason: why no GPU was found.
    """
    if hides_gpus():
        return ""
    builds = torch_builds()
    for kind, name in _OTHER_BUILDS.items():
        if kind in builds and "cuda" not in builds:
            return f"torch is built for {name}, and probes run on NVIDIA GPUs or the CPU alone."
    cards = nvidia_cards()
    if not cards:
        with suppress(NoGpuError):
            cards = tuple(gpu.name for gpu in visible_gpus(None))
    if not cards:
        return ""
    return f"This machine has {plural(len(cards), 'NVIDIA GPU')} ({', '.join(cards)}), and none can be used: {reason}."


def _divided(
    device: Literal["auto", "cuda", "cpu"],
    processes: int | None,
    workers: Workers | None,
    visible: str | None = None,
) -> tuple[Machine, tuple[Share, ...]]:
    packages = installed_packages()
    check_required(packages)
    host = cpu()
    if device == "cpu":
        return _divided_cpu(Machine(host, packages), processes or 1, workers)
    try:
        gpus = visible_gpus(visible)
        if torch_cuda_version() is None:
            raise NoGpuError(f"{gpus[0].name} is there, but torch {packages['torch']} is not built for CUDA")
    except NoGpuError as error:
        if device == "cuda":
            raise InputError(f"Device 'cuda' cannot be used: {error}.", hint=_ON_CPU) from error
        return _divided_cpu(Machine(host, packages, str(error)), processes or 1, workers)
    each = processes or (len(gpus) if workers is None else 1)
    shares = (WHOLE,) if workers is None else _shares_of_gpus(gpus, each, workers)
    cores = max(1, host.cores // len(shares))
    return Machine(replace(_tightest(gpus, each * len(shares)), processes=each, cores=cores), packages), shares


def _divided_cpu(whole: Machine, processes: int, workers: Workers | None) -> tuple[Machine, tuple[Share, ...]]:
    """Return the CPU of one worker, with an equal share of cores and memory, and the shares of all workers.

    The memory is that of one process.

    Raises:
        InputError: there are too few cores.
    """
    host, count = whole.hardware, workers if isinstance(workers, int) else 1
    numbers = core_numbers(Path("/"))
    if count > 1 and count * processes > len(numbers):
        raise InputError(
            f"{_workers_text(count, processes)} need {count * processes} CPU cores, and {len(numbers)} can be used.",
            hint="Give fewer --workers.",
        )
    size = len(numbers) // count
    parts = count * processes
    hardware = replace(
        host,
        processes=processes,
        memory_bytes=host.memory_bytes // parts,
        used_by_others_bytes=host.used_by_others_bytes // parts,
        cores=min(host.cores, size),
    )
    shares = tuple(Share(cores=numbers[size * index : size * (index + 1)]) for index in range(count))
    return replace(whole, hardware=hardware), shares if count > 1 else (WHOLE,)


def _shares_of_gpus(gpus: Sequence[Hardware], processes: int, workers: Workers) -> tuple[Share, ...]:
    """Return the share of each worker: ``processes`` GPUs.

    Raises:
        InputError: there are too few GPUs, their number is not a multiple of ``processes``, or they differ.
    """
    visible = _visible_text(gpus)
    if workers == "auto":
        if len(gpus) % processes:
            raise InputError(
                f"Workers of {processes} processes need a multiple of {processes} GPUs, and {visible}.",
                hint="Give the number of --workers, or another --num-processes.",
            )
        workers = len(gpus) // processes
    needed = workers * processes
    if needed > len(gpus):
        raise InputError(
            f"{_workers_text(workers, processes)} need {needed} GPUs, and {visible}.",
            hint="Give fewer --workers, or fewer --num-processes.",
        )
    names = sorted({gpu.name for gpu in gpus[:needed]})
    if len(names) > 1:
        raise InputError(
            f"Workers need GPUs of one model, since measurements are compared, and these are {', '.join(names)}.",
            hint="Choose GPUs of one model with CUDA_VISIBLE_DEVICES.",
        )
    words = visible_words(needed)
    return tuple(Share(gpus=",".join(words[first : first + processes])) for first in range(0, needed, processes))


def _visible_text(gpus: Sequence[Hardware]) -> str:
    return plural(len(gpus), "GPU is visible", "GPUs are visible")


def _workers_text(count: int, processes: int) -> str:
    return plural(count, "worker") + (f" of {processes} processes" if processes > 1 else "")


def _tightest(gpus: Sequence[Hardware], count: int) -> Hardware:
    """Return the one of the first ``count`` GPUs that has the least free memory, which limits every process.

    Raises:
        InputError: there are fewer GPUs.
    """
    if count > len(gpus):
        raise InputError(
            f"{count} processes need {count} GPUs, and {_visible_text(gpus)}.", hint="Give fewer --num-processes."
        )
    return min(gpus[:count], key=lambda gpu: gpu.available_bytes)


def environment(machine: Machine) -> dict[str, str]:
    """Return the versions of the software that measurements depend on: packages, Python, and the driver."""
    versions = {"python": platform.python_version(), **machine.packages}
    if machine.hardware.driver is not None:
        versions["driver"] = machine.hardware.driver
    return versions


def parse_budget(budget: str | int) -> int:
    """Return a memory budget in bytes.

    Raises:
        InputError: it is not a size, or too small for anything.
    """
    budget_bytes = parse_size(budget)
    # A user who writes 24 means GiB.
    if budget_bytes < MIB:
        raise InputError(f"A memory budget of {budget_bytes} bytes is too small.", hint="Write for instance 24GiB.")
    return budget_bytes


def memory_budget(budget: str | int | None, hardware: Hardware) -> int:
    """Return the memory budget in bytes; without one, all device memory that other processes do not use.

    Args:
        budget: a size such as ``24GiB``, a number of bytes, or None.
        hardware: the device.

    Raises:
        InputError: it is not a size or is larger than the device, or the device has no free memory.
    """
    if budget is None:
        if hardware.available_bytes == 0:
            raise InputError(
                f"Others use all {format_bytes(hardware.memory_bytes)} of {hardware.name}.",
                hint="End the processes that use it, or choose another device.",
            )
        return hardware.available_bytes
    budget_bytes = parse_budget(budget)
    if budget_bytes > hardware.memory_bytes:
        shared = hardware.kind == "cpu" and hardware.processes > 1
        each = f" for each of {hardware.processes} processes" if shared else ""
        raise InputError(
            f"A memory budget of {format_bytes(budget_bytes)} is larger than {hardware.name},"
            f" which has {format_bytes(hardware.memory_bytes)}{each}.",
            hint="Give a smaller one, or none.",
        )
    return budget_bytes
