"""The CUDA device that a training process would get, as the driver describes it (NVML)."""

from __future__ import annotations

import os

from autotune.core.machine import Hardware


class NoGpuError(Exception):
    """There is no CUDA device to train on; the text says why."""


def first_gpu() -> Hardware:
    """Return the first device that ``CUDA_VISIBLE_DEVICES`` leaves visible.

    Indices are taken in the driver's order, by PCI address, as torch's own NVML functions take them.
    Its memory is what CUDA can allocate: the card's less what the driver reserves for itself.

    Raises:
        NoGpuError: there is no driver, no device, or none that is visible.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoGpuError(f"the NVIDIA driver does not answer ({error})") from error
    try:
        return _describe(_first_visible())
    except pynvml.NVMLError as error:
        raise NoGpuError(f"the NVIDIA driver failed to describe the device ({error})") from error
    finally:
        pynvml.nvmlShutdown()


def _first_visible() -> object:
    import pynvml

    count = pynvml.nvmlDeviceGetCount()
    if count == 0:
        raise NoGpuError("the NVIDIA driver knows no device")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return pynvml.nvmlDeviceGetHandleByIndex(0)
    first = visible.split(",")[0].strip()
    if first.isdigit() and int(first) < count:
        return pynvml.nvmlDeviceGetHandleByIndex(int(first))
    if first.startswith("MIG-"):
        return pynvml.nvmlDeviceGetHandleByUUID(first)
    if first.startswith("GPU-"):
        for index in range(count):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            # CUDA takes the beginning of an identifier too.
            if pynvml.nvmlDeviceGetUUID(handle).startswith(first):
                return handle
    raise NoGpuError(f"CUDA_VISIBLE_DEVICES={visible!r} leaves no device visible")


def _describe(handle: object) -> Hardware:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    card = handle
    if pynvml.nvmlDeviceIsMigDeviceHandle(handle):
        card = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(card)
    return Hardware(
        kind="cuda",
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=memory.total - memory.reserved,
        used_by_others_bytes=memory.used,
        compute_capability=(major, minor),
        driver=pynvml.nvmlSystemGetDriverVersion(),
    )
