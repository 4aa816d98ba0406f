"""The shares of a GPU's peak speeds that its operators reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AchievedRates:
    """Shares of a data sheet's peaks; without values, the roofline itself.

    Example: on an A100, whose tensor cores have a peak of 312e12 operations per second, a product of two bfloat16
    matrices takes ``flops / (312e12 * half) + kernel_seconds`` with ``half`` = 0.79.

    Attributes:
        half: of the peak, matrix products of 16-bit types.
        single: of the peak, matrix products of float32.
        kernel_seconds: fixed time of a matrix product.
        attention: of the peak, fused attention of long rows, forward.
        backward_attention: of the forward share, its backward pass.
        attention_tokens: length of row at which attention reaches half of its share.
        pointwise, strided, reduction, norm, softmax, gather, dequantize, optimizer: of the bandwidth, operators that
            memory bounds, by how they pass over their tensors.
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

    def attended(self, tokens: int, *, backward: bool) -> float:
        """Return the share of the peak that fused attention reaches on rows of a length; 0 tokens: long rows."""
        share = self.attention * (self.backward_attention if backward else 1.0)
        return share * tokens / (tokens + self.attention_tokens) if tokens else share

    def linked(self, gpus: int) -> float:
        """Return the share of its links that a collective of so many GPUs of a machine reaches."""
        reached = [share for number, share in self.links if number <= max(gpus, 2)]
        return reached[-1] if reached else 1.0
