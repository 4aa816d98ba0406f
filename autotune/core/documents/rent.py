"""The document of ``autotune plan --gpu all``: memory, speed and cost of a training on each of several GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autotune.core.candidate import Choice
from autotune.core.documents.estimate import Estimate
from autotune.core.documents.short_repr import ShortRepr
from autotune.core.gpu import Gpu
from autotune.core.step_time import TIME_ERROR

BILLION = 1_000_000_000
Unit = Literal["epoch", "billion tokens"]
"""The unit of times and costs: an epoch of the dataset or, without one, a billion tokens."""


def cost_of(seconds: float | None, price: float | None, gpus: int) -> float | None:
    """Return the cost of a time on a number of GPUs at a price per hour of one; None without a time or a price."""
    return seconds / 3600 * price * gpus if seconds is not None and price is not None else None


@dataclass(frozen=True)
class Offer:
    """Training on a number of GPUs of one kind.

    Attributes:
        processes: number of GPUs, each with one process.
        estimate: estimate of the fastest configuration that fits, or else of the one that needs the least; None if
            nothing could be predicted.
        differences: its choices that differ from TRL's default.
        tokens_per_second: rate of all GPUs together; None if the GPU's speed is not known, or nothing fits.
        seconds: time of the table's unit.
        price: price of an hour of one GPU, in the currency of the user's prices; None without one.
        cost: cost of the table's unit on all GPUs, in that currency.
        reason: why nothing fits or could be predicted; empty if something fits.
    """

    gpu: Gpu
    processes: int
    estimate: Estimate | None = None
    differences: Mapping[str, Choice] = field(default_factory=dict)
    tokens_per_second: float | None = None
    seconds: float | None = None
    price: float | None = None
    cost: float | None = None
    reason: str = ""

    @property
    def gpus(self) -> str:
        """Kind of the GPU, after the number of several, such as ``4 x H100-SXM``."""
        return self.gpu.name if self.processes == 1 else f"{self.processes} x {self.gpu.name}"

    @property
    def fits(self) -> bool:
        """Whether a configuration is predicted to fit."""
        return not self.reason

    @property
    def fits_with_error(self) -> bool:
        """Whether it fits even if the estimate is too low by its stated error."""
        return self.estimate is not None and self.estimate.fits_with_error

    @property
    def time_error(self) -> float:
        """Share by which its time, and with it its cost, may be off."""
        memory = self.estimate.memory if self.estimate is not None else None
        return memory.time_error or TIME_ERROR if memory is not None else TIME_ERROR

    @property
    def rate_of_each(self) -> float | None:
        """Tokens per second of one of the GPUs; None if the speed is not known, or nothing fits."""
        return self.tokens_per_second / self.processes if self.tokens_per_second is not None else None


@dataclass(frozen=True, repr=False)
class Rent(ShortRepr):
    """The result of ``autotune plan --gpu all``. Encoded by ``core.codec``, this is its JSON document.

    Attributes:
        offers: those that fit, the cheapest first with prices, else the fastest; then those that do not fit. For a
            single kind of GPU, they are ordered by the number of GPUs.
        unit: unit of ``seconds`` and ``cost`` of the offers.
        priced: whether prices were given.
        trace_count, new_trace_count: number of traces of the table, and how many of them ran now.
        environment: versions of the traced software, by package.
    """

    schema: int = field(default=1, kw_only=True)
    model: str
    dataset: str
    trainer: str
    unit: Unit
    global_batch_size: int
    num_processes: int | Literal["auto"]
    num_machines: int
    priced: bool
    offers: tuple[Offer, ...]
    notes: tuple[str, ...] = ()
    trace_count: int = 0
    new_trace_count: int = 0
    wall_seconds: float = 0.0
    settings: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def fastest(self) -> Offer | None:
        """The offer that fits and takes the least time; None if no time is known."""
        known = [offer for offer in self.offers if offer.fits and offer.seconds is not None]
        return min(known, key=lambda offer: offer.seconds or 0.0, default=None)

    @property
    def cheapest(self) -> Offer | None:
        """The offer that fits and costs the least; None without prices."""
        known = [offer for offer in self.offers if offer.fits and offer.cost is not None]
        return min(known, key=lambda offer: offer.cost or 0.0, default=None)
