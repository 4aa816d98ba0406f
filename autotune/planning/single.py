"""Estimates training plans from traces at their own micro-batch sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from autotune.planning.extrapolation.series import Aligned
from autotune.planning.points import depths_of, trace_request
from autotune.planning.tracing.store import Traces
from autotune.planning.vllm import with_vllm
from autotune.probing.tracing import Traced, Untraceable
from autotune.techniques.attention import unmasked_may_need_more
from autotune.techniques.traits import impact_in, untimed
from autotune.trainers import find_trainer

Size = tuple[Layout, Shape]
"""Layout and shape of a micro-batch."""
_NEAR_SHARE = 0.02
"""Relative difference in tokens up to which a micro-batch's time is scaled from the largest one's, in proportion to the
tokens. The error is at most 2 %, if both are host-bound."""


class UntraceableError(Exception):
    """A step of the plan cannot be traced; the message has the reason."""


class VllmError(Exception):
    """vLLM cannot run next to the training; the message has the reason."""


@dataclass(frozen=True)
class SizedPlan:
    """A training plan with its batch geometry, including evaluation's."""

    plan: TrainingPlan
    geometry: BatchGeometry

    @property
    def is_timed_by_largest(self) -> bool:
        """Whether traces of the largest micro-batches alone give the mean time of a step."""
        return self.sizes(timed=True).keys() == self.sizes(timed=False).keys()

    def sizes(self, *, timed: bool) -> Mapping[Size, None]:
        """Return the distinct micro-batch sizes to trace, for memory alone or also for the time of a step."""
        geometry = self.geometry
        sizes = [_size_of(geometry, shape) for shape in geometry.shapes]
        if timed:
            typical = [*geometry.step_sizes, *(size for apart in geometry.apart for size in apart.sizes)]
            sizes += [self._timing_size(each)[0] for each in typical]
        return dict.fromkeys([*sizes, *(size for size, *_ in self.phases(geometry.worst).values())])

    def phases(self, shape: Shape) -> Mapping[str, tuple[Size, int, float]]:
        """Return the phases with sizes of their own, of a training whose worst micro-batch has ``shape``: the size with
        the most memory, the micro-batches of a step and the number of runs per step, by phase."""
        geometry = self.geometry
        found = {
            apart.phase: (_size_of(geometry, apart.shape_for(shape)), geometry.micro_batches, apart.per_step)
            for apart in geometry.apart
        }
        if geometry.evaluation is not None:
            found[EVALUATE] = _size_of(geometry.evaluation), 1, 0.0
        return found

    def forecast_at(self, size: Size, fits: Mapping[Size, Fit]) -> Forecast:
        """Return the forecast with ``size`` as the largest micro-batch, from extrapolated traces by size."""
        geometry, expandable = self.geometry, self.plan.expandable_segments
        forecast = fits[size].forecast(geometry.micro_batches, expandable)
        for phase, (own, micro_batches, per_step) in self.phases(size[1]).items():
            forecast = forecast.with_phase(phase, fits[own].forecast(micro_batches, expandable), per_step)
        return forecast.with_pass_share(self.plan.pass_share)

    def typical(self, fits: Mapping[Size, Fit]) -> Forecast:
        """Return the forecast with mean times over all micro-batches, and over the runs of phases with own sizes."""
        geometry, expandable = self.geometry, self.plan.expandable_segments

        def mean(sizes: Sequence[Typical]) -> Forecast:
            timed = [self._timing_size(each) for each in sizes]
            return mean_times([(fits[at].forecast(geometry.micro_batches, expandable), weight) for at, weight in timed])

        forecast = mean(geometry.step_sizes)
        for apart in geometry.apart:
            forecast = forecast.with_phase(apart.phase, mean(apart.sizes), apart.per_step)
        return forecast.with_pass_share(self.plan.pass_share)

    def _timing_size(self, typical: Typical) -> tuple[Size, float]:
        """Return the size at which a typical micro-batch is timed, and the weight of that time.

        It is the largest, which is traced for memory anyway, if that is near. Ranks that share a row have equal parts.
        """
        geometry, plan = self.geometry, self.plan
        worst, shape = geometry.worst, typical.shape
        resized = replace(worst, tokens=shape.tokens, filled=shape.filled, beside=shape.beside, trained=shape.trained)
        widths = (shape.tokens, worst.tokens), (shape.beside, worst.beside)
        if resized == shape and all((1 - _NEAR_SHARE) * largest <= tokens <= largest for tokens, largest in widths):
            return _size_of(geometry), typical.share * shape.tokens / worst.tokens
        split = plan.launch.processes // plan.data_ranks
        multiple = 2 * split if split > 1 else 1
        tokens = max(1, round(shape.tokens / multiple)) * multiple
        return (geometry.layout, replace(shape, tokens=tokens, filled=round(shape.filled, 3))), typical.share


@dataclass(frozen=True)
class TracedPlan(SizedPlan):
    """A training plan that was traced at its own sizes.

    Attributes:
        geometry: its worst shape needs the most memory by the traces.
        worst: forecast of that micro-batch, for the whole model.
        mean: the same with mean times over all micro-batches if ``timed``; else with those of the widest one.
        memory: estimate without vLLM, with the traces' assumptions. Its time is that of ``mean``.
        timed: whether all sizes that represent its micro-batches were traced.
    """

    worst: Forecast
    mean: Forecast
    memory: MemoryEstimate
    timed: bool
    fits: Mapping[Size, Fit]

    @property
    def fit(self) -> Fit:
        """The traces of the worst micro-batch."""
        return self.fits[_size_of(self.geometry)]

    @property
    def varies(self) -> bool:
        """Whether micro-batches differ from the worst one."""
        return self.geometry.typical != self.geometry.worst

    @property
    def scaled_seconds(self) -> float | None:
        """Time of a step, scaled from the worst micro-batch in proportion to tokens; None if unknown."""
        geometry = self.geometry
        seconds = self.worst.step_seconds(geometry.micro_batches)
        return seconds * mean_shape(geometry.step_sizes).tokens / geometry.worst.tokens if seconds else None

    @property
    def aligned(self) -> bool:
        """Whether memory was extrapolated moment by moment."""
        return all(fit.aligned for fit in self.fits.values())

    @property
    def stretches(self) -> Mapping[Stretch, Aligned]:
        """Memory of the whole model in each stretch of a step."""
        largest, phases = _size_of(self.geometry), self.phases(self.geometry.worst)
        sizes = {stretch: phases.get(stretch[0].phase, (largest,))[0] for stretch in self.worst.stretches}
        return {stretch: self.fits[size].stretches[stretch] for stretch, size in sizes.items()}


class PlanTracer:
    """Traces training plans on a GPU or a CPU with measured speeds (None: any CPU, without times), few layers deep."""

    def __init__(self, traces: Traces, setting: Setting, device: Gpu | None) -> None:
        self._traces, self._setting, self._device = traces, setting, device
        self._layer_kinds = setting.workload.model.layer_kinds

    def memory(self, sized: SizedPlan, *, whole: bool = False) -> MemoryEstimate:
        """Return the memory of a plan, including vLLM's, and the time of a step on its largest micro-batches.

        If ``whole``, it is traced at full depth, and after varied lengths.

        Raises:
            UntraceableError: a step of the plan cannot be traced.
            VllmError: vLLM cannot run next to the training.
        """
        (traced,) = self.traced([sized], timed=False)
        if isinstance(traced, Untraceable):
            raise UntraceableError(traced.reason)
        if whole:
            (traced,) = self.whole([traced], varied=True)
        memory = with_vllm(traced.memory, sized.plan, self._setting)
        if isinstance(memory, str):
            raise VllmError(memory)
        return memory

    def traced(self, plans: Sequence[SizedPlan], *, timed: bool) -> list[TracedPlan | Untraceable]:
        """Trace plans, all at once; if ``timed``, at all sizes that the time of a step needs, else at the largest."""
        requests = [self._requests_of(sized, timed=timed) for sized in plans]
        replies = iter(self._traces.get([request for each in requests for request in each.values()]))
        found = [{at: next(replies) for at in each} for each in requests]
        return [self._extrapolated(sized, each) for sized, each in zip(plans, found, strict=True)]

    def _largest_sizes(self, sized: SizedPlan) -> list[Size]:
        """Return the micro-batch sizes that may need the most memory.

        These may include one of equally long rows: it has no mask, and attention may need more memory without one.
        """
        plan, geometry, workload = sized.plan, sized.geometry, self._setting.workload
        sizes = [_size_of(geometry, shape) for shape in geometry.shapes]
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
            sizes += [(Layout.EQUAL, replace(geometry.worst, tokens=width, filled=1.0)) for width in widths[-1:]]
        return sizes

    def whole(self, plans: Sequence[TracedPlan], *, varied: bool) -> list[TracedPlan]:
        """Return plans with their worst micro-batches traced at full depth, or unchanged if that fails.

        Reserved bytes cannot be extrapolated, because the reuse of freed blocks changes with depth: a Llama of 1.1B
        parameters has 0.5 GB of unused reserved memory with 4 of its 22 layers, and 1.2 with all. A CPU's allocator
        reserves nothing. If ``varied``, the additional memory of micro-batches of varied lengths is traced, too.
        """
        if self._setting.machine.hardware.kind == "cpu":
            return [replace(traced, memory=replace(traced.memory, varied_bytes=0)) for traced in plans]
        requests = [
            replace(self._request(traced.plan, _size_of(traced.geometry)), varied=varied and traced.varies)
            for traced in plans
        ]
        return [
            self._with_full_depth(traced, reply) if isinstance(reply, TraceReply) else traced
            for traced, reply in zip(plans, self._traces.get(requests), strict=True)
        ]

    def _request(self, plan: TrainingPlan, size: Size, depth: int = 0, *, steps_alone: bool = False) -> TraceRequest:
        """Return the request that traces a plan at a size and a number of layers; 0: all."""
        layers = depth or len(self._layer_kinds)
        return trace_request(plan, *size, layers, self._setting, self._device, steps_alone=steps_alone)

    def _with_full_depth(self, traced: TracedPlan, reply: TraceReply) -> TracedPlan:
        layers, largest = len(self._layer_kinds), _size_of(traced.geometry)
        fits = {**traced.fits, largest: Fit({layers: reply}, layers)}
        worst = traced.forecast_at(largest, fits)
        memory = self._memory(traced, worst, traced.mean, fits)
        varied_bytes = reply.replayed(traced.plan.expandable_segments).varied_bytes if traced.varies else 0
        return replace(traced, worst=worst, memory=replace(memory, varied_bytes=varied_bytes), fits=fits)

    def _requests_of(self, sized: SizedPlan, *, timed: bool) -> Mapping[tuple[Size, int], TraceRequest]:
        """Return the requests of a plan by size and depth; sizes for time alone neither evaluate nor save."""
        plan = sized.plan
        requests: dict[tuple[Size, int], TraceRequest] = {}
        for_memory = {**dict.fromkeys(self._largest_sizes(sized)), **sized.sizes(timed=False)}
        for size in {**for_memory, **sized.sizes(timed=timed)}:
            steps_alone = size not in for_memory
            for depth in depths_of(plan, self._layer_kinds, for_memory=not steps_alone):
                requests[size, depth] = self._request(plan, size, depth, steps_alone=steps_alone)
        return requests

    def _extrapolated(self, sized: SizedPlan, replies: Mapping[tuple[Size, int], Traced]) -> TracedPlan | Untraceable:
        plan, geometry = sized.plan, sized.geometry
        traces: dict[Size, dict[int, TraceReply]] = {}
        for (size, depth), reply in replies.items():
            if isinstance(reply, Untraceable):
                return reply
            traces.setdefault(size, {})[depth] = reply
        layers, edges = len(self._layer_kinds), impact_in(plan).gathers_ahead
        fits = {size: Fit(by_depth, layers, edges=edges) for size, by_depth in traces.items()}
        forecasts = {size: sized.forecast_at(size, fits) for size in self._largest_sizes(sized)}
        layout, shape = largest = max(forecasts, key=lambda size: forecasts[size].reserved_bytes)
        worst, timed = forecasts[largest], fits.keys() >= sized.sizes(timed=True).keys()
        mean = sized.typical(fits) if timed else forecasts[_size_of(geometry)]
        return TracedPlan(
            plan=plan,
            geometry=replace(geometry, layout=layout, worst=shape, rivals=()),
            worst=worst,
            mean=mean,
            memory=self._memory(sized, worst, mean, fits),
            timed=timed,
            fits=fits,
        )

    def _memory(self, sized: SizedPlan, worst: Forecast, mean: Forecast, fits: Mapping[Size, Fit]) -> MemoryEstimate:
        hardware = self._setting.machine.hardware
        memory = memory_estimate(worst, mean, sized.geometry.micro_batches, self._device, hardware.kind)
        assumptions = {assumed for fit in fits.values() for assumed in fit.assumptions}
        seconds = None if untimed(sized.plan, hardware) else memory.step_seconds
        return replace(memory, step_seconds=seconds, assumptions=tuple(sorted(assumptions)))


def _size_of(geometry: BatchGeometry, shape: Shape | None = None) -> Size:
    """Return the size of a micro-batch: that of a shape, or the worst one."""
    return geometry.layout, shape or geometry.worst
