"""Estimates single training plans from traces at the sizes of their own micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.core.batch_geometry import BatchGeometry, Layout, Shape, Typical, mean_shape
from autotune.core.estimate import MemoryEstimate
from autotune.core.gpu import Gpu
from autotune.core.plan import TrainingPlan
from autotune.core.program import EVALUATE
from autotune.core.setting import Setting
from autotune.core.traced import TraceReply, TraceRequest
from autotune.planning.extrapolation.fit import Fit
from autotune.planning.extrapolation.forecast import Forecast, Stretch, mean_times, memory_estimate
from autotune.planning.extrapolation.series import Levels
from autotune.planning.points import depths_of, trace_request
from autotune.planning.tracing.store import Traces
from autotune.planning.vllm import with_vllm
from autotune.probing.tracing import Traced, Untraceable
from autotune.techniques.attention import unmasked_may_need_more
from autotune.techniques.traits import impact_in, untimed
from autotune.trainers import find_trainer

Size = tuple[Layout, Shape]
"""Layout and shape of a micro-batch."""
_NEARLY = 0.02
"""Relative difference in tokens up to which a micro-batch's time is scaled from the largest one, in proportion to the
tokens. The error is at most 2 %, if the time of both is host-bound."""


class UntraceableError(Exception):
    """A step of the plan cannot be traced; the message has the reason.

    Attributes:
        raised_at: see :attr:`autotune.core.protocol.Failure.raised_at`.
    """

    def __init__(self, found: Untraceable) -> None:
        super().__init__(found.reason)
        self.raised_at = found.raised_at


class VllmError(Exception):
    """vLLM cannot run beside the training; the message has the reason."""


@dataclass(frozen=True)
class Sized:
    """A training plan with its batch geometry, including that of evaluation if there is one."""

    plan: TrainingPlan
    geometry: BatchGeometry

    @property
    def is_timed_by_largest(self) -> bool:
        """Whether traces of the largest micro-batches alone give the mean time of a step."""
        return self.sizes(timed=True).keys() == self.sizes(timed=False).keys()

    def sizes(self, *, timed: bool) -> Mapping[Size, None]:
        """Return the distinct sizes at which the plan is traced, for memory alone or also for the time of a step."""
        geometry = self.geometry
        every = [_full(geometry, shape) for shape in geometry.shapes]
        if timed:
            typical = [*geometry.awaited, *(size for apart in geometry.apart for size in apart.sizes)]
            every += [self._timed(each)[0] for each in typical]
        return dict.fromkeys([*every, *(phase.size for phase in phases_at_own_size(geometry, geometry.worst))])

    def at_worst(self, size: Size, fits: Mapping[Size, Fit]) -> Forecast:
        """Return the forecast with ``size`` as the largest micro-batch, given the traces at each size."""
        geometry, growing = self.geometry, self.plan.expandable_segments
        found = fits[size].forecast(geometry.micro_batches, growing)
        for phase in phases_at_own_size(geometry, size[1]):
            at_its_own = fits[phase.size].forecast(phase.micro_batches, growing)
            found = found.taking(phase.phase, at_its_own, phase.per_step)
        return found.spread(self.plan.pass_share)

    def typical(self, fits: Mapping[Size, Fit]) -> Forecast:
        """Return the forecast with mean times over all micro-batches, and over all runs of phases with their own sizes.

        If several ranks run micro-batches at once, the time of the largest counts.
        """
        geometry, growing = self.geometry, self.plan.expandable_segments

        def mean(sizes: Sequence[Typical]) -> Forecast:
            timed = [self._timed(each) for each in sizes]
            return mean_times([(fits[at].forecast(geometry.micro_batches, growing), weight) for at, weight in timed])

        found = mean(geometry.awaited)
        for apart in geometry.apart:
            found = found.taking(apart.phase, mean(apart.sizes), apart.per_step)
        return found.spread(self.plan.pass_share)

    def _timed(self, typical: Typical) -> tuple[Size, float]:
        """Return the size at which a typical micro-batch is timed, and the weight of that time.

        A micro-batch of nearly the largest size is timed by the largest, which is traced for memory anyway. Others are
        rounded to tokens that divide evenly among ranks that share a row.
        """
        geometry, plan = self.geometry, self.plan
        worst, shape = geometry.worst, typical.shape
        sized = replace(worst, tokens=shape.tokens, filled=shape.filled, beside=shape.beside, trained=shape.trained)
        figures = (shape.tokens, worst.tokens), (shape.beside, worst.beside)
        if sized == shape and all((1 - _NEARLY) * most <= own <= most for own, most in figures):
            return _full(geometry), typical.share * shape.tokens / worst.tokens
        split = plan.launch.processes // plan.data_ranks
        multiple = 2 * split if split > 1 else 1
        tokens = max(1, round(shape.tokens / multiple)) * multiple
        return (geometry.layout, replace(shape, tokens=tokens, filled=round(shape.filled, 3))), typical.share


@dataclass(frozen=True)
class TracedPlan(Sized):
    """A training plan that was traced at its own sizes.

    Attributes:
        geometry: its worst shape is the one that needs the most memory by the traces.
        worst: forecast of that micro-batch, for the whole model.
        mean: the same with the mean times over all micro-batches if ``timed``; else with those of the widest one.
        memory: of the training alone, excluding vLLM's memory. Its time is that of ``mean``.
        timed: whether all sizes that represent its micro-batches were traced.
        fits: extrapolated traces, by size.
    """

    worst: Forecast
    mean: Forecast
    memory: MemoryEstimate
    timed: bool
    fits: Mapping[Size, Fit]

    @property
    def fit(self) -> Fit:
        """The traces of the worst micro-batch."""
        return self.fits[_full(self.geometry)]

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The assumptions of its traces where the step depends on the values of real data, in sentences."""
        return tuple(sorted({assumed for fit in self.fits.values() for assumed in fit.assumptions}))

    @property
    def scaled_seconds(self) -> float | None:
        """Time of a step from that of the worst micro-batch, as if time were proportional to tokens; None: unknown."""
        geometry = self.geometry
        seconds = self.worst.step_seconds(geometry.micro_batches)
        return seconds * mean_shape(geometry.awaited).tokens / geometry.worst.tokens if seconds else None

    @property
    def aligned(self) -> bool:
        """Whether memory was extrapolated moment by moment."""
        return all(fit.aligned for fit in self.fits.values())

    def courses(self) -> Mapping[Stretch, Sequence[Levels]]:
        """Return the bytes of tensors at each moment of a step, by stretch."""
        return {stretch: self._fit_of(stretch).course(stretch) for stretch in self.worst.stretches}

    def highest_moment(self, stretch: Stretch) -> str:
        """Return the name of the moment of a stretch with the most bytes of tensors."""
        return self._fit_of(stretch).highest_moment(stretch)

    def _fit_of(self, stretch: Stretch) -> Fit:
        at = {phase.phase: phase.size for phase in phases_at_own_size(self.geometry, self.geometry.worst)}
        return self.fits[at.get(stretch[0].phase, _full(self.geometry))]


class PlanTracer:
    """Traces plans; only depth is extrapolated.

    Args:
        device: the GPU, or a CPU whose speeds were measured; None: any CPU, without times, where tensors alone count.
    """

    def __init__(self, traces: Traces, setting: Setting, device: Gpu | None) -> None:
        self._traces = traces
        self._setting = setting
        self._device = device
        self._layer_kinds = setting.workload.model.layer_kinds

    def memory(self, sized: Sized, *, whole: bool = False) -> MemoryEstimate:
        """Return memory of a plan, what vLLM holds beside it included, and the time of a step on its largest
        micro-batches.

        Args:
            whole: whether it is traced at full depth and after varied lengths.

        Raises:
            UntraceableError: a step of it cannot be traced.
            VllmError: vLLM cannot run beside it.
        """
        (found,) = self.traced([sized], timed=False)
        if isinstance(found, Untraceable):
            raise UntraceableError(found)
        if whole:
            (found,) = self.whole([found], varied=True)
        shared = with_vllm(found.memory, sized.plan, self._setting)
        if isinstance(shared, str):
            raise VllmError(shared)
        return replace(shared, assumptions=found.assumptions)

    def traced(self, every: Sequence[Sized], *, timed: bool) -> list[TracedPlan | Untraceable]:
        """Return the traced plans, or why they cannot be traced; all traces are requested at once.

        Args:
            timed: whether to trace the sizes that represent all micro-batches for the time of a step; else the time is
                that of the largest.
        """
        wanted = [self._requests(sized, timed=timed) for sized in every]
        requests = [request for sizes in wanted for depths in sizes.values() for request in depths.values()]
        replies = iter(self._traces.get(requests))
        return [
            self._traced(sized, {size: {depth: next(replies) for depth in depths} for size, depths in sizes.items()})
            for sized, sizes in zip(every, wanted, strict=True)
        ]

    def _largest(self, sized: Sized) -> list[Size]:
        """Return the sizes of micro-batches that may need the most memory.

        A micro-batch of equally long rows has no mask, and attention may need more without one.
        """
        plan, geometry, workload = sized.plan, sized.geometry, self._setting.workload
        found = [_full(geometry, shape) for shape in geometry.shapes]
        capability = self._device.compute_capability if self._device is not None else None
        if (
            self._setting.machine.hardware.kind == "cuda"
            and geometry.layout is Layout.PADDED
            and not geometry.worst.chosen
            # Completions of different lengths have masks.
            and not geometry.worst.generated
            and unmasked_may_need_more(plan, capability, grouped=workload.model.grouped_heads)
        ):
            _, widths = find_trainer(plan.trainer).widths(plan, workload.dataset.documents)
            found += [(Layout.EQUAL, replace(geometry.worst, tokens=width, filled=1.0)) for width in widths[-1:]]
        return found

    def whole(self, every: Sequence[TracedPlan], *, varied: bool) -> list[TracedPlan]:
        """Return plans with their worst micro-batches traced at full depth, or unchanged if that fails.

        Reserved bytes cannot be extrapolated: which freed blocks later tensors fit into changes with depth. Example: a
        Llama of 1.1B parameters has 0.5 GB of unused reserved memory with 4 of its 22 layers, and 1.2 with all. The
        CPU's allocator has no cache.

        Args:
            varied: whether to trace the additional memory of micro-batches of varied lengths, if lengths vary.
        """
        if self._setting.machine.hardware.kind == "cpu":
            return [replace(traced, memory=replace(traced.memory, varied_bytes=0)) for traced in every]
        replies = self._traces.get([self._whole_request(traced, varied=varied) for traced in every])
        return [
            self._whole(traced, reply) if isinstance(reply, TraceReply) else traced
            for traced, reply in zip(every, replies, strict=True)
        ]

    def _whole_request(self, traced: TracedPlan, *, varied: bool) -> TraceRequest:
        plan, geometry = traced.plan, traced.geometry
        varies = varied and geometry.typical != geometry.worst
        layers = len(self._layer_kinds)
        request = trace_request(plan, geometry.layout, geometry.worst, layers, self._setting, self._device)
        return replace(request, varied=varies)

    def _whole(self, traced: TracedPlan, reply: TraceReply) -> TracedPlan:
        geometry, layers = traced.geometry, len(self._layer_kinds)
        fits = {**traced.fits, _full(geometry): Fit({layers: reply}, layers)}
        worst = traced.at_worst(_full(geometry), fits)
        memory = self._memory(traced, worst, traced.mean)
        replayed = reply.replayed(traced.plan.expandable_segments)
        varied_bytes = 0 if geometry.typical == geometry.worst else replayed.varied_bytes
        return replace(traced, worst=worst, memory=replace(memory, varied_bytes=varied_bytes), fits=fits)

    def _requests(self, sized: Sized, *, timed: bool) -> Mapping[Size, Mapping[int, TraceRequest]]:
        """Return the requests of a plan by size and depth; for sizes needed for time alone, only steps are traced."""
        plan, setting, device = sized.plan, self._setting, self._device
        for_memory = {**dict.fromkeys(self._largest(sized)), **sized.sizes(timed=False)}
        found = {}
        for size in {**for_memory, **sized.sizes(timed=timed)}:
            alone = size not in for_memory
            depths = depths_of(plan, self._layer_kinds, for_memory=not alone)
            found[size] = {
                depth: trace_request(plan, *size, depth, setting, device, steps_alone=alone) for depth in depths
            }
        return found

    def _traced(self, sized: Sized, replies: Mapping[Size, Mapping[int, Traced]]) -> TracedPlan | Untraceable:
        plan, geometry = sized.plan, sized.geometry
        fits: dict[Size, Fit] = {}
        for size, found in replies.items():
            good = {depth: reply for depth, reply in found.items() if not isinstance(reply, Untraceable)}
            failed = next((reply for reply in found.values() if isinstance(reply, Untraceable)), None)
            if failed is not None:
                return failed
            fits[size] = Fit(good, len(self._layer_kinds), edges=impact_in(plan).gathers_ahead)
        at_worst = {size: sized.at_worst(size, fits) for size in self._largest(sized)}
        layout, shape = decisive = max(at_worst, key=lambda size: at_worst[size].reserved_bytes)
        worst, timed = at_worst[decisive], fits.keys() >= sized.sizes(timed=True).keys()
        mean = sized.typical(fits) if timed else at_worst[_full(geometry)]
        return TracedPlan(
            plan=plan,
            geometry=replace(geometry, layout=layout, worst=shape, rivals=()),
            worst=worst,
            mean=mean,
            memory=self._memory(sized, worst, mean),
            timed=timed,
            fits=fits,
        )

    def _memory(self, sized: Sized, worst: Forecast, mean: Forecast) -> MemoryEstimate:
        hardware = self._setting.machine.hardware
        memory = memory_estimate(worst, mean, sized.geometry.micro_batches, self._device, hardware.kind)
        return replace(memory, step_seconds=None) if untimed(sized.plan, hardware) else memory


@dataclass(frozen=True)
class PhaseAtOwnSize:
    """A phase with its own sizes: the size with the most memory, and the number of runs per step."""

    phase: str
    size: Size
    micro_batches: int
    per_step: float


def phases_at_own_size(geometry: BatchGeometry, shape: Shape) -> Iterator[PhaseAtOwnSize]:
    """Yield the phases with their own sizes, for a training whose worst micro-batches have ``shape``."""
    for apart in geometry.apart:
        size = _full(geometry, apart.shape_for(shape))
        yield PhaseAtOwnSize(apart.phase, size, geometry.micro_batches, apart.per_step)
    if geometry.evaluation is not None:
        yield PhaseAtOwnSize(EVALUATE, _full(geometry.evaluation), 1, 0.0)


def _full(geometry: BatchGeometry, shape: Shape | None = None) -> Size:
    """Return the size of a micro-batch of a shape; None: of the worst."""
    return geometry.layout, shape or geometry.worst
