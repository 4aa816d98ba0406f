"""The figures of a trace: peaks of tensors, what an allocator counts, and what differs between GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.core.gpu import Gpu, GpuSpeeds
from autotune.core.plan import AllocatorUse
from autotune.core.step_time import StepTime


@dataclass(frozen=True)
class TracedPeak:
    """The most bytes that tensors held at once, without any allocator's rounding.

    Attributes:
        bytes: sum of the parts.
        categories: the parts, by PyTorch's names: ``parameter``, ``buffer``, ``gradient``, ``optimizer state``,
            ``activation``, ``temporary``, ``other``. Those of zero bytes are left out.
    """

    bytes: int
    categories: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TracedOperator:
    """An operator on arguments of certain metadata, which a trace ran once or several times.

    Attributes:
        call: the operator with its arguments, as text that a process on the real device can run.
        seconds: predicted time of one run on the device, from its peak speeds.
        kind: the figure of :class:`autotune.core.step_time.StepTime` that this time is part of.
    """

    call: str
    seconds: float
    kind: str


def tensors_in(arguments: Any) -> list[Any]:
    """Return shape, strides, type, and whether it is on the device, of each tensor in the arguments of a call.

    Args:
        arguments: as parsed from the text of :attr:`TracedOperator.call`.
    """
    if isinstance(arguments, dict):
        return [arguments["tensor"]] if "tensor" in arguments else []
    return [found for item in arguments for found in tensors_in(item)] if isinstance(arguments, (list, tuple)) else []


@dataclass(frozen=True)
class Replayed:
    """Peaks of the caching allocator for the same trace, with one setting of the allocator.

    Attributes:
        allocated_bytes, reserved_bytes: as in :class:`autotune.core.protocol.TraceReply`.
    """

    allocator: AllocatorUse
    allocated_bytes: int
    reserved_bytes: int | None


@dataclass(frozen=True)
class GpuFigures:
    """The figures of a trace that differ between GPUs with the same kernels.

    Attributes:
        capability, speeds: of these GPUs.
        replays, step: as in :class:`autotune.core.protocol.TraceReply`.
        times: of its sections, in their order.
    """

    capability: tuple[int, int] | None
    speeds: GpuSpeeds | None
    replays: tuple[Replayed, ...]
    step: StepTime | None
    times: tuple[StepTime | None, ...]

    def are_of(self, gpu: Gpu | None) -> bool:
        """Return whether they are the figures of a GPU; of none means without times."""
        asked = (gpu.compute_capability, gpu.speeds) if gpu is not None else (None, None)
        return (self.capability, self.speeds) == asked

    @property
    def gpu(self) -> Gpu:
        """A GPU that has these figures, with all else left open."""
        return Gpu("", 0, "given", "", 0, speeds=self.speeds, compute_capability=self.capability)
