"""Estimates training plans from traces at their own micro-batch sizes and at few numbers of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, lcm

from autotune.core.documents.estimate import MemoryEstimate
from autotune.core.gpu import Gpu
from autotune.core.jobs.traced import TraceReply, TraceRequest
from autotune.core.plan import TrainingPlan
from autotune.core.program import EVALUATE, MICRO_BATCH, PRECOMPUTE
from autotune.core.rows.batch_geometry import BatchGeometry, Layout, Shape, Typical, mean_shape
from autotune.core.rows.images import ChosenRows
from autotune.core.setting import Setting
from autotune.core.workload import ModelProfile
from autotune.planning.extrapolation.fit import Fit
from autotune.planning.extrapolation.forecast import Forecast, mean_times, memory_estimate
from autotune.planning.tracing.store import Traces
from autotune.planning.vllm import with_vllm
from autotune.probing.tracing import Traced, Untraceable
from autotune.techniques.attention import unmasked_may_need_more
from autotune.techniques.traits import has_no_predicted_time, plan_impact
from autotune.trainers import find_trainer
from autotune.trainers.evaluation import otherwise_padded

Size = tuple[Layout, Shape]
"""Layout and shape of a micro-batch."""
_NEAR_SHARE = 0.02
"""Relative difference in tokens up to which a micro-batch's time is scaled from the largest one's, in proportion to the
tokens. The error is at most 2 %, if both are host-bound."""
# A trace needs a first and a last layer, which have different live tensors.
_MIN_DEPTH = 2
# More would make traces of few layers as slow as one of all. Memory of smaller layers is then extrapolated too high,
# until they are traced with all layers.
_MOST_AT_EDGES = 5


class UntraceableError(Exception):
    """A step of the plan cannot be traced; the message has the reason."""


class VllmError(Exception):
    """vLLM cannot run next to the training; the message has the reason."""


def edges_of(plan: TrainingPlan, model: ModelProfile) -> int:
    """Return the periods of layers at either end that differ from those between.

    Prefetching that runs ahead of use stops at its limit, of which the output head takes a part.
    """
    impact = plan_impact(plan)
    ahead = ceil((impact.gathers_ahead - model.largest_weight) * len(model.layer_kinds) / max(1, model.quantizable))
    _, period = _repetition(model.layer_kinds)
    return ceil(max(impact.edges, min(ahead, _MOST_AT_EDGES)) / lcm(period, impact.layer_period))


def depths_of(
    plan: TrainingPlan, layer_kinds: Sequence[str], *, edges: int = 0, for_memory: bool = True
) -> tuple[int, ...]:
    """Return the depths at which a plan is traced.

    Args:
        edges: see :func:`edges_of`.
        for_memory: whether memory is needed; else only the time of a step, which is a sum over layers.
    """
    impact = plan_impact(plan)
    if impact.needs_all_layers or (impact.uneven and for_memory):
        return (len(layer_kinds),)
    return traced_depths(layer_kinds, impact.layer_period, edges=edges)


def traced_depths(kinds: Sequence[str], extra_period: int = 1, *, edges: int = 0) -> tuple[int, ...]:
    """Return the one or two depths from which the full depth is extrapolated, or the full depth if that is no slower.

    Both end with the same kind of layer as the whole model. The deeper one has one more period of the layer pattern.

    Example: 32 equal layers give ``(2, 3)``; 32 layers of two alternating kinds give ``(2, 4)``.

    Args:
        kinds: the kind of each layer, in order.
        extra_period: period that a technique adds, such as 2 for checkpointing every second layer.
        edges: periods at either end that differ from those between.
    """
    layers = len(kinds)
    start, period = _repetition(kinds)
    period = lcm(period, extra_period)
    first = start + (layers - start) % period
    while first < max(_MIN_DEPTH, start + period * max(1, 2 * edges)):
        first += period
    # All layers take no longer to trace than two depths that have as many together.
    return (layers,) if first + (first + period) >= layers else (first, first + period)


def _repetition(kinds: Sequence[str]) -> tuple[int, int]:
    """Return the layer at which the pattern starts to repeat and its period, with the smallest sum of the two."""
    layers = len(kinds)
    patterns = (
        (start, period)
        for total in range(1, layers + 1)
        for period in range(1, total + 1)
        for start in (total - period,)
        if all(kinds[index] == kinds[index + period] for index in range(start, layers - period))
    )
    return next(patterns, (0, layers or 1))


def trace_request(
    plan: TrainingPlan, layout: Layout, shape: Shape, layers: int, setting: Setting, gpu: Gpu | None
) -> TraceRequest:
    """Return the request that traces a plan with a micro-batch of a shape.

    Args:
        layers: number of the model's first layers.
    """
    trainer = find_trainer(plan.trainer)
    workload, dataset = setting.workload, setting.workload.dataset
    profile = workload.evaluation if shape.evaluated and workload.evaluation is not None else dataset
    chosen = ChosenRows(profile.tokenized_directory, profile.fingerprint, shape.chosen) if shape.chosen else None
    share = shape.trained or dataset.trainable_tokens / dataset.documents.tokens
    trainable = round(shape.filled * share, 3)
    return TraceRequest(
        plan=trainer.traced_plan(plan, layout, shape),
        model=workload.model_source,
        target=setting.machine.hardware.kind,
        worst=trainer.traced_rows(layout, shape, trainable),
        trainable=trainable,
        layers=layers,
        gpu=gpu,
        emptied=plan.empties_cache,
        chosen=chosen,
        compiled_again=trainer.compiled_again(plan, layout, dataset.documents),
    )


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
        largest = [_size_of(self.geometry, shape) for shape in self.geometry.shapes]
        parts = [part for each in (*largest, *((None,) if timed else ())) for part in self._parts(each)]
        return dict.fromkeys(size for _, sizes, *_ in parts for size, _ in sizes)

    def forecast(self, fits: Mapping[Size, Fit], largest: Size | None) -> Forecast:
        """Return the forecast of a step.

        Args:
            fits: extrapolated traces, by size.
            largest: the largest micro-batch; None: times are means over all micro-batches, and over the runs of phases
                with sizes of their own.
        """
        forecast = None
        for phase, sizes, micro_batches, per_step in self._parts(largest):
            own = [(fits[at].forecast(micro_batches, self.plan.expandable_segments), weight) for at, weight in sizes]
            mean = mean_times(own, self.plan.pass_share(self.geometry.rows))
            forecast = forecast.with_phase(phase, mean, per_step) if forecast is not None else mean
            if phase == EVALUATE:
                # A reference also passes over the rows to evaluate on, which may be longer.
                forecast = forecast.with_higher(PRECOMPUTE, mean)
        assert forecast is not None
        return forecast

    def _parts(self, largest: Size | None) -> Iterator[tuple[str, Sequence[tuple[Size, float]], int, float]]:
        """Yield the micro-batch, then the phases with sizes of their own, as :meth:`forecast` needs them.

        Each is its phase, its sizes with their weights in the mean time, the micro-batches of a step, and its runs per
        step. Without a largest micro-batch, the sizes are typical ones.
        """
        geometry = self.geometry

        def weighted(typical: Sequence[Typical], worst: Size | None) -> Sequence[tuple[Size, float]]:
            return [(worst, 1.0)] if worst is not None else [self._timing_size(each) for each in typical]

        yield MICRO_BATCH, weighted(geometry.step_sizes, largest), geometry.micro_batches, 1.0
        for apart in geometry.phases:
            layout = apart.layout or geometry.layout
            worst = (layout, apart.shape_for(largest[1])) if largest is not None else None
            yield apart.phase, weighted(apart.sizes, worst), geometry.micro_batches, apart.per_step
        if geometry.evaluation is not None:
            yield EVALUATE, [(_size_of(geometry.evaluation), 1.0)], 1, 0.0

    def _timing_size(self, typical: Typical) -> tuple[Size, float]:
        """Return the size at which a typical micro-batch is timed, and the weight of that time.

        It is the largest, which is traced for memory anyway, if that is near. Ranks that share a row have equal parts.
        """
        geometry, plan = self.geometry, self.plan
        worst, shape = geometry.worst, typical.shape
        resized = replace(
            worst, tokens=shape.tokens, filled=shape.filled, second_tokens=shape.second_tokens, trained=shape.trained
        )
        widths = (shape.tokens, worst.tokens), (shape.second_tokens, worst.second_tokens)
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
        time, tokens = self.worst.step(geometry.micro_batches), mean_shape(geometry.step_sizes).tokens
        return time.seconds * tokens / geometry.worst.tokens if time is not None and time.seconds else None

    @property
    def aligned(self) -> bool:
        """Whether memory was extrapolated moment by moment."""
        return all(fit.aligned for fit in self.fits.values())


class PlanTracer:
    """Traces training plans and extrapolates their depth.

    Args:
        device: the GPU, or a CPU with measured speeds; None: any CPU, without times, where only tensors count.
    """

    def __init__(self, traces: Traces, setting: Setting, device: Gpu | None) -> None:
        self._traces = traces
        self._setting = setting
        self._device = device
        self._layer_kinds = setting.workload.model.layer_kinds
        self._request = partial(trace_request, setting=setting, gpu=device)

    def memory(self, sized: SizedPlan, *, whole: bool = False) -> MemoryEstimate:
        """Return the memory of a plan, including vLLM's, and the time of a step on its largest micro-batches.

        Args:
            whole: whether to trace at full depth, and after varied lengths.

        Raises:
            AutotuneError: traces cannot be run.
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
        """Trace plans, all at once; return each traced plan or its failure.

        Args:
            timed: whether to trace all sizes that the time of a step needs; else the time is the largest one's.
        """
        requests = [self._requests_of(sized, timed=timed) for sized in plans]
        replies = iter(self._traces.get([request for each in requests for request in each.values()]))
        found = [{at: next(replies) for at in each} for each in requests]
        return [self._extrapolated(sized, each) for sized, each in zip(plans, found, strict=True)]

    def _heaviest(self, sized: SizedPlan) -> list[SizedPlan]:
        """Return a plan, and with it the plan on narrower micro-batches if these may need more memory.

        Padding brings an attention mask, with which other kernels run than without. Both may need more memory: with a
        mask, sdpa stores the keys and values of grouped heads once for each head; without one, see
        :func:`autotune.techniques.attention.unmasked_may_need_more`.
        """
        plan, workload, hardware = sized.plan, self._setting.workload, self._setting.machine.hardware
        capability = self._device.compute_capability if self._device is not None else None
        unmasked = hardware.kind == "cuda" and unmasked_may_need_more(
            plan, capability, grouped=workload.model.grouped_heads
        )
        other = otherwise_padded(find_trainer(plan.trainer), plan, workload, sized.geometry, unmasked=unmasked)
        return [sized, *([SizedPlan(plan, other)] if other is not None else [])]

    def whole(self, plans: Sequence[TracedPlan], *, varied: bool) -> list[TracedPlan]:
        """Return plans with their worst micro-batches traced at full depth, or unchanged if that fails.

        Reserved bytes cannot be extrapolated, because the reuse of freed blocks changes with depth: a Llama of 1.1B
        parameters has 0.5 GB of unused reserved memory with 4 of its 22 layers, and 1.2 with all. A CPU's allocator
        reserves nothing.

        Args:
            varied: whether to trace the additional memory of micro-batches of varied lengths, if lengths vary.
        """
        if self._setting.machine.hardware.kind == "cpu":
            return [replace(traced, memory=replace(traced.memory, varied_bytes=0)) for traced in plans]
        layers, found = len(self._layer_kinds), list[TracedPlan]()
        requests = [self._request(each.plan, *_size_of(each.geometry), layers=layers) for each in plans]
        varying = [replace(each, varied=varied and plan.varies) for each, plan in zip(requests, plans, strict=True)]
        for traced, reply in zip(plans, self._traces.get(varying), strict=True):
            if isinstance(reply, Untraceable):
                found.append(traced)
                continue
            fits = {**traced.fits, _size_of(traced.geometry): Fit({layers: reply}, layers)}
            worst = traced.forecast(fits, _size_of(traced.geometry))
            varied_bytes = reply.replayed(traced.plan.expandable_segments).varied_bytes if traced.varies else 0
            memory = replace(self._memory(traced, worst, traced.mean, fits), varied_bytes=varied_bytes)
            found.append(replace(traced, worst=worst, memory=memory, fits=fits))
        return found

    def _requests_of(self, sized: SizedPlan, *, timed: bool) -> Mapping[tuple[Size, int], TraceRequest]:
        """Return the requests of a plan by size and depth; sizes for time alone neither evaluate nor save."""
        plan = sized.plan
        requests: dict[tuple[Size, int], TraceRequest] = {}
        edges = edges_of(plan, self._setting.workload.model)
        for_memory = {size: None for each in self._heaviest(sized) for size in each.sizes(timed=False)}
        for size in {**for_memory, **sized.sizes(timed=timed)}:
            steps_alone = size not in for_memory
            for depth in depths_of(plan, self._layer_kinds, edges=edges, for_memory=not steps_alone):
                requests[size, depth] = replace(self._request(plan, *size, layers=depth), steps_alone=steps_alone)
        return requests

    def _extrapolated(self, sized: SizedPlan, replies: Mapping[tuple[Size, int], Traced]) -> TracedPlan | Untraceable:
        plan, geometry = sized.plan, sized.geometry
        traces: dict[Size, dict[int, TraceReply]] = {}
        for (size, depth), reply in replies.items():
            if isinstance(reply, Untraceable):
                return reply
            traces.setdefault(size, {})[depth] = reply
        layers, edges, impact = len(self._layer_kinds), edges_of(plan, self._setting.workload.model), plan_impact(plan)
        fits = {size: Fit(by_depth, layers, edges=edges, impact=impact) for size, by_depth in traces.items()}
        forecasts = [
            (each.forecast(fits, size), each, size)
            for each in self._heaviest(sized)
            for size in (_size_of(each.geometry, shape) for shape in each.geometry.shapes)
        ]
        worst, heaviest, (layout, shape) = max(forecasts, key=lambda found: found[0].reserved_bytes)
        timed = fits.keys() >= sized.sizes(timed=True).keys()
        mean = sized.forecast(fits, None) if timed else sized.forecast(fits, _size_of(geometry))
        return TracedPlan(
            plan=plan,
            geometry=replace(heaviest.geometry, layout=layout, worst=shape, rivals=(), masked=None),
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
        seconds = None if has_no_predicted_time(sized.plan, hardware) else memory.step_seconds
        return replace(memory, step_seconds=seconds, assumptions=tuple(sorted(assumptions)))


def _size_of(geometry: BatchGeometry, shape: Shape | None = None) -> Size:
    """Return the size of a micro-batch: that of a shape, or the worst one."""
    return geometry.layout, shape or geometry.worst
