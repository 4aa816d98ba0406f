"""The job ``trace``: its request, its reply, and the figures in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.core.batch_geometry import Recompiled
from autotune.core.gpu import Gpu, GpuSpeeds
from autotune.core.images import ChosenRows
from autotune.core.machine import DeviceKind
from autotune.core.plan import TrainingPlan
from autotune.core.step_time import StepTime
from autotune.core.timeline import Occurrence, Section
from autotune.core.workload import ModelSource


@dataclass(frozen=True)
class Peak:
    """The most bytes that tensors held at once, without any allocator's rounding.

    Attributes:
        bytes: sum of the parts.
        categories: the parts, by PyTorch's names: ``parameter``, ``buffer``, ``gradient``, ``optimizer state``,
            ``activation``, ``temporary``. Those of zero bytes are left out.
    """

    bytes: int = 0
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
    """Peaks of the caching allocator for a trace, with segments of fixed size or with growing ones.

    Attributes:
        allocated_bytes: CUDA: peak of what the caching allocator would count as allocated (rounding and library
            workspaces included, context excluded). CPU: the peak of tensor bytes.
        reserved_bytes: CUDA: peak of what it would reserve. CPU: None.
        needed_bytes: peak of what it would reserve on a device that is short of memory, to which it returns its cache.
        varied_bytes: bytes that it would reserve in addition after micro-batches of other lengths; None if that was not
            requested.
    """

    allocated_bytes: int
    reserved_bytes: int | None
    needed_bytes: int | None
    varied_bytes: int | None = None


@dataclass(frozen=True)
class GpuFigures:
    """The figures of a trace that differ between GPUs with the same kernels.

    Attributes:
        capability, speeds: of these GPUs.
        replays: with segments of fixed size, then with growing ones; empty with the target ``cpu``, which has no such
            allocator, and for steps alone.
        times: of its sections, in their order; None without a GPU whose speeds are known.
    """

    capability: tuple[int, int] | None
    speeds: GpuSpeeds | None
    replays: tuple[Replayed, ...]
    times: tuple[StepTime | None, ...]

    def are_of(self, gpu: Gpu | None) -> bool:
        """Return whether they are the figures of a GPU; of none means without times."""
        asked = (gpu.compute_capability, gpu.speeds) if gpu is not None else (None, None)
        return (self.capability, self.speeds) == asked

    @property
    def gpu(self) -> Gpu:
        """A GPU that has these figures, with all else left open."""
        return Gpu("", 0, "given", "", 0, speeds=self.speeds, compute_capability=self.capability)


@dataclass(frozen=True)
class TraceRequest:
    """Run training steps of one plan on the virtual accelerator, with no GPU and no storage.

    The job ``build`` takes plan, model, device and rows of one, and builds the trainer alone; it replies with a
    :class:`autotune.core.configuration.Built`.

    The rows are dataset rows as ``prepare`` returns them: the trainer truncates, packs and pads them. Each is given by
    the tokens of its parts, in the trainer's order: ``(100, 50, 80)`` for prompt, chosen and rejected.

    Attributes:
        target: the device that is simulated: ``cuda``, or ``cpu`` for the CPU's allocator and kernels.
        worst: the rows that make the largest micro-batch. Without packing: the longest rows of the dataset,
            as many as a micro-batch has (fewer are repeated). With packing: enough rows to fill one.
        trainable: share of the tokens, the last of each row, that the loss counts if the parts do not determine it.
        layers: number of the model's first layers to trace, or None for all.
        gpu: the device that is planned for; its speeds give the time of a step, its compute capability the kernels. A
            CPU whose speeds were measured is described in the same way. None: no time is predicted.
        emptied: whether the cache of the allocator is emptied before every backward pass.
        varied: whether to trace what micro-batches of varied lengths add, with the target ``cuda``.
        steps_alone: whether only the steps are traced, for their time or what they hold between micro-batches: there is
            no evaluation, no save and no replay.
        others: further GPUs that the reply may stand for, if their kernels are the same.
        operators: whether the reply has the operators of the steps.
        chosen: the rows with images that take the place of ``worst``; None for text.
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
            rank that holds the most.
        host: peak of tensors on the host (offloaded activations, batches).
        worst_rows, worst_tokens: rows and tokens, padding included, of the largest micro-batch that was run.
        tokens_per_step: dataset tokens of an optimizer step on that micro-batch on all ranks, padding excluded.
        between: the occurrence of a micro-batch that stands for those between the first and the last of a step. Several
            processes exchange gradients in the last one alone.
        assumptions: assumptions where the step depends on the values of real data, with counts.
        seconds: time that the trace took.
        sections: memory over the second step on the worst micro-batch, part by part.
        gpus: the figures of all GPUs that the trace stands for, those of the request's own first.
        operators: the different operators of the sections, if they were requested.
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

    @property
    def replays(self) -> tuple[Replayed, ...]:
        """The replays of the request's GPU."""
        return self.own.replays

    def replayed(self, expandable_segments: bool = False) -> Replayed:
        """Return the figures of the caching allocator with such segments; without replays, those of tensors."""
        return self.replays[expandable_segments] if self.replays else Replayed(self.device.bytes, None, None)
