"""The memory of a GPU, its peak speeds, and the rates that operators achieve."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

MemoryKind = Literal["usable", "total", "given"]

ALL_GPUS = "all"
"""The word for every GPU of the catalogue."""
AMPERE = (8, 0)
"""The lowest compute capability with tensor cores for bfloat16 and TF32, and with FlashAttention 2's kernels."""


@dataclass(frozen=True)
class AchievedRates:
    """The shares of a data sheet's peak speeds that operators achieve; the defaults are the peaks themselves.

    Example: on an A100, whose tensor cores have a peak of 312e12 operations per second, a product of two bfloat16
    matrices takes ``flops / (312e12 * half) + kernel_seconds`` with ``half`` = 0.80.

    Attributes:
        half: share of the peak of 16-bit matrix products.
        single: share of the peak of float32 matrix products.
        kernel_seconds: fixed time of a matrix product.
        attention: share of the peak of fused attention on long rows, forward.
        attention_kernels: the same by kernel, for kernels that differ.
        backward_attention: the backward pass's share, relative to the forward pass's.
        attention_tokens: row length at which attention reaches half of its share.
        pointwise, strided, reduction, norm, softmax, gather, dequantize, optimizer: shares of the memory bandwidth of
            memory-bound operators, by their access pattern.
        batched: share of the memory bandwidth of memory-bound batched matrix products.
        pass_seconds: fixed time of a memory-bound operator.
        cache_bytes: L2 cache available to successive operators; 0: none, or not known.
        cache_bandwidth: bytes per second of pointwise operators on tensors in the L2 cache.
        copies: share of PCIe's bandwidth of copies between the device and pinned host memory.
        links: shares of the bandwidth of NVLink or PCIe, by the number of GPUs of a collective in a machine, ascending.
        sustained: time of an operator in a training over its time alone on the device.
        source: source of the figures.
        generation: figures taken from another card of the same generation; empty: none.
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

    def product_share(self, dtype: str) -> float:
        """Return the share of the peak that matrix products in a type such as ``bfloat16`` achieve."""
        return self.half if dtype in ("float16", "bfloat16") else self.single

    def bandwidth_share(self, access: str) -> float:
        """Return the share of the memory bandwidth that operators with an access pattern achieve."""
        return float(getattr(self, access))

    def attention_share(self, kernel: str, tokens: int, *, backward: bool) -> float:
        """Return the share of the peak that an attention kernel achieves on rows of a length; 0 tokens: long rows."""
        share = dict(self.attention_kernels).get(kernel, self.attention)
        share *= self.backward_attention if backward else 1.0
        return share * tokens / (tokens + self.attention_tokens) if tokens else share

    def link_share(self, gpus: int) -> float:
        """Return the share of the links' bandwidth that a collective of this many GPUs in a machine achieves."""
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
        bridged: number of devices that an NVLink bridge connects; None: NVLink connects all of a machine.
        network: bytes per second from the GPU's machine to other machines, all its GPUs together, in one direction, or
            None if that is not known.
        achieved: the shares of these peaks that operators achieve.
        launch_seconds: measured host time of one operator; None: the usual one
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
        """Return the peak operations per second of a matrix product in a type such as ``bfloat16``.

        Types that the tensor cores do not support, and float32 without TF32, run at the rate of float32. 8-bit integers
        run at least at that of float16 (cuBLASLt, https://docs.nvidia.com/cuda/cublas/).
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
        memory_kind: meaning of ``memory_bytes``: ``usable``: allocatable, as CUDA reports it; ``total``: the driver's
            total, part of which it reserves; ``given``: given by the user.
        memory_source: address of the source of that figure; empty if it is the user's, or this machine's driver's.
        context_bytes: estimated memory of a PyTorch process outside its allocator: context, kernels, libraries.
        context_source: address of the report that it was derived from, or our own page of measurements; empty if it is
            a guess.
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
        """Return the GPU in a machine with a network of this many bytes per second; unchanged without known speeds."""
        return self if self.speeds is None else replace(self, speeds=replace(self.speeds, network=network))
