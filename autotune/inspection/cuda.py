"""Lists the CUDA devices that a training process would see, by NVML, without initialising CUDA."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml

from autotune.core.machine import Hardware
from autotune.inspection.cpu import cpu

BY_ADDRESS = "CUDA_DEVICE_ORDER=PCI_BUS_ID"
"""With this variable, CUDA numbers devices as the driver does, by PCI address; by default, the fastest come first."""
# Values of CUDA_VISIBLE_DEVICES by which users hide all devices.
_NONE_VISIBLE = ("", "-1", "NoDevFiles")
_VENDOR, _DISPLAY_CLASS = "0x10de", "0x03"


class NoGpuError(Exception):
    """There is no CUDA device to train on; the message has the reason."""


def visible_gpus(visible: str | None = None) -> tuple[Hardware, ...]:
    """Return the devices that ``CUDA_VISIBLE_DEVICES`` makes visible, in its order; at least one.

    Indices are in the driver's order, by PCI address, as in torch's NVML functions. If the machine's cards differ, the
    devices have the variable with which CUDA counts alike. The memory excludes what the driver reserves for itself.

    Args:
        visible: the value of the variable for another process; None: that of this process.

    Raises:
        NoGpuError: there is no driver, no device, or no visible device.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound as error:
        raise NoGpuError("there is no NVIDIA driver") from error
    except pynvml.NVMLError as error:
        raise NoGpuError(f"the NVIDIA driver does not answer ({error})") from error
    try:
        variables = BY_ADDRESS if len(_models_of_cards()) > 1 else ""
        return tuple(replace(_describe(handle), variables=variables) for handle in _visible_handles(visible))
    except pynvml.NVMLError as error:
        raise NoGpuError(f"the NVIDIA driver failed to describe the device ({error})") from error
    finally:
        pynvml.nvmlShutdown()


def hides_gpus() -> bool:
    """Return whether ``CUDA_VISIBLE_DEVICES`` hides all GPUs on purpose."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return value is not None and value.strip() in _NONE_VISIBLE


def nvidia_cards(root: Path = Path("/")) -> tuple[str, ...]:
    """Return where the kernel shows NVIDIA's GPUs, whether or not their driver works: PCI addresses, or device files.

    Args:
        root: directory with ``sys``, ``proc`` and ``dev``.
    """
    addresses = {
        device.name
        for device in (root / "sys/bus/pci/devices").glob("*")
        if _text(device / "vendor") == _VENDOR and _text(device / "class").startswith(_DISPLAY_CLASS)
    }
    addresses |= {device.name for device in (root / "proc/driver/nvidia/gpus").glob("*")}
    files = (root / "dev").glob("nvidia[0-9]*")
    return tuple(sorted(addresses)) or tuple(sorted(f"/dev/{file.name}" for file in files))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def visible_words(count: int) -> tuple[str, ...]:
    """Return the entries of ``CUDA_VISIBLE_DEVICES`` for the first ``count`` visible devices, in order."""
    return tuple(_variable_words(os.environ.get("CUDA_VISIBLE_DEVICES"), count)[:count])


def _variable_words(visible: str | None, count: int) -> list[str]:
    """Return the entries of the variable; if it is not set, the indices of ``count`` devices."""
    words = map(str, range(count)) if visible is None else visible.split(",")
    return [word.strip() for word in words]


def _models_of_cards() -> set[str]:
    """Return the names of all cards that answer, visible or not."""
    names = set()
    for index in range(pynvml.nvmlDeviceGetCount()):
        with suppress(pynvml.NVMLError):
            names.add(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index)))
    return names


def _visible_handles(visible: str | None) -> list[Any]:
    count = pynvml.nvmlDeviceGetCount()
    if count == 0:
        raise NoGpuError("the NVIDIA driver reports no device")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    # CUDA ignores the entries from the first invalid one on.
    named = list(itertools.takewhile(bool, (_handle_of(word, count) for word in _variable_words(visible, count))))
    # It sees none if one is named twice (torch.cuda, `_parse_visible_devices`).
    if not named or len(set(map(pynvml.nvmlDeviceGetUUID, named))) < len(named):
        raise NoGpuError(f"CUDA_VISIBLE_DEVICES={visible!r} leaves no device visible")
    used = [device for device in map(_card_or_mig_instance, named) if device]
    if not used:
        raise NoGpuError("MIG is enabled, and there is no instance")
    # With MIG, a process gets a single instance (NVIDIA's MIG user guide, "CUDA Device Enumeration").
    return used if used == named else used[:1]


def _card_or_mig_instance(device: Any) -> Any:
    """Return a device as CUDA uses it: the first instance of a card with MIG, or None if it has no instance."""
    with suppress(pynvml.NVMLError):  # neither cards without MIG nor instances have the mode
        if pynvml.nvmlDeviceGetMigMode(device)[0]:
            for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(device)):
                with suppress(pynvml.NVMLError):  # there is no such instance
                    return pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index)
            return None
    return device


def _handle_of(word: str, count: int) -> Any:
    """Return the device of an entry of ``CUDA_VISIBLE_DEVICES``, or None for an invalid entry."""
    if word.isdigit() and int(word) < count:
        return pynvml.nvmlDeviceGetHandleByIndex(int(word))
    if word.startswith("MIG-"):
        return pynvml.nvmlDeviceGetHandleByUUID(word)
    if word.startswith("GPU-"):
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(count))
        named = [handle for handle in handles if pynvml.nvmlDeviceGetUUID(handle).startswith(word)]
        # CUDA accepts a prefix of a single UUID.
        return named[0] if len(named) == 1 else None
    return None


def _describe(handle: Any) -> Hardware:
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        total_bytes, used_bytes = memory.total - memory.reserved, memory.used
    except pynvml.NVMLError_NotSupported:
        # The GPU shares the host's memory, as in a DGX Spark.
        total_bytes, used_bytes = cpu().memory_bytes, cpu().used_by_others_bytes
    card = handle
    if pynvml.nvmlDeviceIsMigDeviceHandle(handle):
        card = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(card)
    return Hardware(
        kind="cuda",
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=total_bytes,
        used_by_others_bytes=used_bytes,
        compute_capability=(major, minor),
        driver=pynvml.nvmlSystemGetDriverVersion(),
    )
