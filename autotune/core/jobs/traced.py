"""The request and the reply of the job ``trace``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.core.gpu import Gpu, GpuSpeeds
from autotune.core.machine import DeviceKind
from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import Recompiled
from autotune.core.rows.images import ChosenRows
from autotune.core.step_time import StepTime
from autotune.core.timeline import Occurrence, Section
from autotune.core.workload import ModelSource


@dataclass(frozen=True)
class Peak:
    """The peak of tensor bytes, without an allocator's rounding.

    Attributes:
        bytes: sum of the categories.
        categories: bytes by PyTorch's category: ``parameter``, ``buffer``, ``gradient``, ``optimizer state``,
            ``activation``, ``temporary``; without empty ones.
    """

    bytes: int = 0
    categories: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TracedOperator:
    """An operator with the metadata of its arguments, which a trace ran once or several times.

    Attributes:
        call: the operator with its arguments, as text that a process on the real device can run.
        seconds: predicted time of one run on the device.
        kind: the field of :class:`autotune.core.step_time.StepTime` that includes this time.
    """

    call: str
    seconds: float
    kind: str


def tensors_in(arguments: Any) -> list[Any]:
    """Return the metadata of each tensor in the arguments of a call: shape, strides, type, whether on the device.

    Args:
        arguments: parsed from the text of :attr:`TracedOperator.call`.
    """
    if isinstance(arguments, dict):
        return [arguments["tensor"]] if "tensor" in arguments else []
    return [found for item in arguments for found in tensors_in(item)] if isinstance(arguments, (list, tuple)) else []


@dataclass(frozen=True)
class Replayed:
    """Peaks of the simulated caching allocator for a trace, with fixed or expandable segments.

    Attributes:
        allocated_bytes: CUDA: peak of allocated bytes (rounding and library workspaces included, context excluded).
            CPU: peak of tensor bytes.
        reserved_bytes: CUDA: peak of reserved bytes. CPU: None.
        needed_bytes: peak of reserved bytes on a device that is short of memory, to which the allocator returns its
            cache.
        varied_bytes: bytes reserved in addition after micro-batches of other lengths; None unless requested.
    """

    allocated_bytes: int
    reserved_bytes: int | None
    needed_bytes: int | None
    varied_bytes: int | None = None


@dataclass(frozen=True)
class GpuFigures:
    """The figures of a trace that differ between GPUs with the same kernels.

    Attributes:
        capability, speeds: compute capability and speeds of these GPUs.
        replays: with fixed segments, then with expandable ones; empty with the target ``cpu``, which has no such
            allocator, and for traces of steps only.
        times: times of the trace's sections, in order; None without known speeds.
    """

    capability: tuple[int, int] | None
    speeds: GpuSpeeds | None
    replays: tuple[Replayed, ...]
    times: tuple[StepTime | None, ...]

    def are_of(self, gpu: Gpu | None) -> bool:
        """Return whether these are the figures of a GPU; None: of a trace without times."""
        expected = (gpu.compute_capability, gpu.speeds) if gpu is not None else (None, None)
        return (self.capability, self.speeds) == expected

    @property
    def gpu(self) -> Gpu:
        """A GPU with this compute capability and these speeds, and nothing else known."""
        return Gpu("", 0, "given", "", 0, speeds=self.speeds, compute_capability=self.capability)


@dataclass(frozen=True)
class TraceRequest:
    """Run training steps of one plan on the virtual accelerator, with no GPU and no storage.

    The rows are dataset rows as ``prepare`` returns them: the trainer truncates, packs and pads them. Each is given by
    the tokens of its parts, in the trainer's order: ``(100, 50, 80)`` for prompt, chosen and rejected.

    Attributes:
        target: the simulated device: ``cuda``, or ``cpu`` for the CPU's allocator and kernels.
        worst: the rows of the largest micro-batch. Without packing: the longest rows of the dataset, as many as a
            micro-batch has (fewer are repeated). With packing: enough rows to fill one.
        trainable: share of the tokens, the last of each row, that the loss counts if the parts do not determine it.
        layers: number of the model's first layers to trace, or None for all.
        gpu: the device; its speeds determine the time of a step, its compute capability the kernels. A CPU with
            measured speeds is described in the same way. None: no time is predicted.
        emptied: whether the cache of the allocator is emptied before every backward pass.
        varied: whether to trace the memory that micro-batches of varied lengths add, with the target ``cuda``.
        steps_alone: whether to trace only steps, for their time or their memory between micro-batches, without
            evaluation, save and replay.
        others: further GPUs for which the reply holds if their kernels are the same.
        operators: whether the reply has the operators of the steps.
        chosen: the rows with images, in place of ``worst``; None for text.
        compiled_again: see :func:`autotune.trainers.micro_batches.MicroBatches.compiled_again`.
    """

    plan: TrainingPlan
    model: ModelSource
    target: DeviceKind
    worst: tuple[tuple[int, ...], ...]
    trainable: float = 1.0
    layers: int | None = None
    gpu: Gpu | None = None
    varied: bool = False
    steps_alone: bool = False
    emptied: bool = False
    others: tuple[Gpu, ...] = ()
    operators: bool = False
    chosen: ChosenRows | None = None
    compiled_again: Recompiled = field(default_factory=Recompiled)


@dataclass(frozen=True)
class TraceReply:
    """The traced memory of training, and the predicted times of an optimizer step's parts.

    Attributes:
        device: peak on the device, from building the model to the end of the second step on the worst micro-batch.
            With the target ``cpu`` everything is on the device. With several processes, all peaks are those of the
            rank with the highest one.
        host: peak of tensors on the host (offloaded activations, batches).
        worst_rows, worst_tokens: rows and tokens, padding included, of the largest micro-batch that ran.
        tokens_per_step: dataset tokens of an optimizer step on that micro-batch on all ranks, padding excluded.
        between: the occurrence that represents the micro-batches between the first and the last of a step; several
            processes exchange gradients only in the last one.
        assumptions: assumptions about values of real data on which the step depends, with counts.
        seconds: duration of the trace.
        sections: memory over the second step on the worst micro-batch, part by part.
        gpus: the figures of all GPUs for which the trace holds, those of the request's own first.
        operators: the distinct operators of the sections, if requested.
    """

    device: Peak
    host: Peak
    worst_rows: int
    worst_tokens: int
    tokens_per_step: float
    between: Occurrence = Occurrence.FURTHER
    assumptions: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    sections: tuple[Section, ...] = ()
    gpus: tuple[GpuFigures, ...] = ()
    operators: tuple[TracedOperator, ...] = ()

    @property
    def own(self) -> GpuFigures:
        """The figures of the request's GPU."""
        return self.gpus[0]

    def replayed(self, expandable_segments: bool = False) -> Replayed:
        """Return the allocator's peaks with expandable or fixed segments; without replays, the peak of tensors."""
        replays = self.own.replays
        return replays[expandable_segments] if replays else Replayed(self.device.bytes, None, None)
