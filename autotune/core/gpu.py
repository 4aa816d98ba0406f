"""The memory and the speeds of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

MemoryKind = Literal["usable", "total", "given"]

AMPERE = (8, 0)
"""CUDA's lowest compute capability with tensor cores for bfloat16 and TF32, and with kernels of FlashAttention 2."""


@dataclass(frozen=True)
class AchievedRates:
    """Shares of a data sheet's peaks; without values, the roofline itself.

    Example: on an A100, whose tensor cores have a peak of 312e12 operations per second, a product of two bfloat16
    matrices takes ``flops / (312e12 * half) + kernel_seconds`` with ``half`` = 0.80.

    Attributes:
        half: of the peak, matrix products of 16-bit types.
        single: of the peak, matrix products of float32.
        kernel_seconds: fixed time of a matrix product.
        attention: of the peak, fused attention of long rows, forward.
        attention_kernels: the same by kernel, of those that differ from it.
        backward_attention: of the forward share, its backward pass.
        attention_tokens: length of row at which attention reaches half of its share.
        pointwise, strided, reduction, norm, softmax, gather, dequantize, optimizer: of the bandwidth, operators that
            memory bounds, by how they pass over their tensors.
        batched: of the bandwidth, batched matrix products that memory bounds.
        pass_seconds: fixed time of an operator that memory bounds.
        cache_bytes: bytes that the L2 cache holds for operators that follow one another; 0: none, or not known.
        cache_bandwidth: bytes per second of pointwise operators whose tensors it holds.
        copies: of PCIe, copies between the device and pinned memory of the host.
        links: of NVLink or PCIe, by the number of GPUs that a collective joins in a machine, ascending.
        sustained: time of an operator within a training over its time alone on the device.
        source: source of the figures.
        generation: which of them are another card's of the same generation, for lack of figures; empty: none.
    """

    half: float = 1.0
    single: float = 1.0
    kernel_seconds: float = 0.0
    attention: float = 1.0
    attention_kernels: tuple[tuple[str, float], ...] = ()
    backward_attention: float = 1.0
    attention_tokens: float = 0.0
    pointwise: float = 1.0
    strided: float = 1.0
    reduction: float = 1.0
    norm: float = 1.0
    softmax: float = 1.0
    gather: float = 1.0
    dequantize: float = 1.0
    optimizer: float = 1.0
    batched: float = 1.0
    pass_seconds: float = 0.0
    cache_bytes: float = 0.0
    cache_bandwidth: float = 0.0
    copies: float = 1.0
    links: tuple[tuple[int, float], ...] = ()
    sustained: float = 1.0
    source: str = ""
    generation: str = ""

    def product(self, dtype: str) -> float:
        """Return the share of the peak that matrix products in a type such as ``bfloat16`` reach."""
        return self.half if dtype in ("float16", "bfloat16") else self.single

    def passing(self, access: str) -> float:
        """Return the share of the bandwidth that operators reach, by the name of how they pass over their tensors."""
        return float(getattr(self, access))

    def attended(self, kernel: str, tokens: int, *, backward: bool) -> float:
        """Return the share of the peak that a kernel of attention reaches on rows of a length; 0 tokens: long rows."""
        share = dict(self.attention_kernels).get(kernel, self.attention)
        share *= self.backward_attention if backward else 1.0
        return share * tokens / (tokens + self.attention_tokens) if tokens else share

    def linked(self, gpus: int) -> float:
        """Return the share of its links that a collective of so many GPUs of a machine reaches."""
        reached = [share for number, share in self.links if number <= max(gpus, 2)]
        return reached[-1] if reached else 1.0


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
            reports, part of which it reserves; ``given``: what the user gave.
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
