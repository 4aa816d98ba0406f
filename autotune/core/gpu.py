"""The memory and the speeds of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from autotune.core.achieved import AchievedRates

MemoryKind = Literal["usable", "total", "nominal", "given"]


@dataclass(frozen=True)
class GpuSpeeds:
    """Peak speeds of a GPU; dense, without structured sparsity.

    Attributes:
        bandwidth: bytes per second of the device's memory.
        fp32: floating-point operations per second outside the tensor cores.
        fp16: the same for float16 in the tensor cores, accumulated in float32.
        bf16: the same for bfloat16 in the tensor cores, or None if they do not support it.
        tf32: the same for float32 in the tensor cores, or None if they do not support it.
        pcie: bytes per second between host and device, in one direction.
        nvlink: bytes per second to all other devices together, in one direction, or None if there is no NVLink.
        source: address of the source of these figures.
        bridged: devices that NVLink joins where it is a bridge between cards; None: all of a machine.
        network: bytes per second that the machine of the GPU sends to other machines, with all its GPUs together, in
            one direction, or None if that is not known.
        achieved: the shares of these peaks that operators reach.
        launch_seconds: the host's time for one operator, if it was measured; None: the usual one
            (:class:`autotune.core.step_time.Pace`).
    """

    bandwidth: float
    fp32: float
    fp16: float
    bf16: float | None
    tf32: float | None
    pcie: float
    nvlink: float | None
    source: str
    network: float | None = None
    bridged: int | None = None
    achieved: AchievedRates = field(default_factory=AchievedRates)
    launch_seconds: float | None = None

    def peak(self, dtype: str, *, allow_tf32: bool = False) -> float:
        """Return the floating-point operations per second of a matrix product in a type such as ``bfloat16``.

        Types that the tensor cores do not support, and float32 unless TF32 is allowed, run at float32's rate. Integers
        of 8 bits run at least at that of float16 (cuBLASLt, https://docs.nvidia.com/cuda/cublas/).
        """
        tensor_cores = {
            "float16": self.fp16,
            "bfloat16": self.bf16,
            "float32": self.tf32 if allow_tf32 else None,
            "int8": self.fp16,
        }
        return tensor_cores.get(dtype) or self.fp32


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: the name in the catalogue, or the size that the user gave.
        memory_bytes: its memory.
        memory_kind: what ``memory_bytes`` is: ``usable``: what CUDA reports as allocatable; ``total``: what the driver
            reports, part of which it reserves; ``nominal``: what the card is sold with; ``given``: what the user gave.
        memory_source: address of the source of that figure; empty if the user gave it, or this machine's driver.
        context_bytes: estimate of what a process with PyTorch holds outside its allocator: context, kernels, libraries.
        context_source: address of the report that it was derived from, or our own page of what a GPU showed; empty if
            it is a guess.
        speeds: peak speeds; None if they are not known.
        compute_capability: CUDA's (major, minor), or None.
        aliases: other names, such as the driver's.
        verified: whether autotune's rules are known to hold for this kind of GPU.
    """

    name: str
    memory_bytes: int
    memory_kind: MemoryKind
    memory_source: str
    context_bytes: int
    context_source: str = ""
    speeds: GpuSpeeds | None = None
    compute_capability: tuple[int, int] | None = None
    aliases: tuple[str, ...] = ()
    verified: bool = True

    def networked(self, network: float | None) -> Gpu:
        """Return the GPU in a machine with such a network, in bytes per second; one of unknown speed stays as it is."""
        return self if self.speeds is None else replace(self, speeds=replace(self.speeds, network=network))
