"""Estimates one training plan by traces at the sizes of its own micro-batches, without a search space around it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autotune.core.batch_geometry import BatchGeometry, Layout, Shape
from autotune.core.estimate import MemoryEstimate
from autotune.core.gpu import Gpu
from autotune.core.plan import TrainingPlan
from autotune.core.program import EVALUATE
from autotune.core.setting import Setting
from autotune.planning.extrapolation.anchors import LONGEST_FLAT, anchors
from autotune.planning.extrapolation.fit import Fit
from autotune.planning.extrapolation.forecast import Forecast
from autotune.planning.extrapolation.memory import TRACED_ERROR, memory_estimate
from autotune.planning.extrapolation.shape import Anchors, Basis
from autotune.planning.points import fit_of, traced_points
from autotune.planning.requests import trace_request
from autotune.planning.tracing.store import Traces
from autotune.planning.varied import varied_bytes
from autotune.planning.vllm import with_vllm
from autotune.probing.tracing import Untraceable
from autotune.techniques.traits import untimed


class UntraceableError(Exception):
    """A step of the plan cannot be traced; the message says why."""


class VllmError(Exception):
    """vLLM cannot run beside the training; the message says why."""


@dataclass(frozen=True)
class Sized:
    """A training plan with the micro-batches that it makes.

    Attributes:
        geometry: of its training, and of its evaluation if there is one.
    """

    plan: TrainingPlan
    geometry: BatchGeometry


class PlanTracer:
    """Traces plans one at a time: only the depth is extrapolated, and the length of long rows that lie end to end."""

    def __init__(self, traces: Traces, setting: Setting, gpu: Gpu | None) -> None:
        self._traces = traces
        self._setting = setting
        self._gpu = gpu
        self._layer_kinds = setting.workload.model.layer_kinds

    def memory(self, sized: Sized) -> MemoryEstimate:
        """Return memory and time of a plan at the worst of its micro-batches, what vLLM holds beside it included.

        Raises:
            UntraceableError: a step of it cannot be traced.
            VllmError: vLLM cannot run beside it.
        """
        geometry = sized.geometry
        fits = self._fits(sized)
        found = [self._at(sized.plan, geometry, shape, fits) for shape in geometry.shapes]
        worst = max(found, key=lambda forecast: forecast.peak_bytes + forecast.overhead_bytes + forecast.unused_bytes)
        # Its time is that of a step on the largest micro-batches.
        memory = memory_estimate(worst, found[0], geometry.micro_batches, self._gpu, TRACED_ERROR)
        if untimed(sized.plan, self._setting.machine.hardware):
            memory = replace(memory, step_seconds=None)
        shared = with_vllm(memory, sized.plan, self._setting)
        if isinstance(shared, str):
            raise VllmError(shared)
        assumptions = sorted({assumed for fit in fits.values() for assumed in fit.assumptions})
        return replace(shared, assumptions=tuple(assumptions))

    def varied_bytes(self, sized: Sized) -> int | None:
        """Return what the caching allocator may reserve beyond after micro-batches of varied lengths; None: unknown."""
        geometry = sized.geometry
        at = geometry.layout, geometry.worst, len(self._layer_kinds)
        return varied_bytes(self._traces, sized.plan, *at, self._setting, self._gpu)

    def _at(
        self, plan: TrainingPlan, geometry: BatchGeometry, shape: Shape, fits: dict[tuple[Layout, Shape], Fit]
    ) -> Forecast:
        found = self._forecast(plan, fits[geometry.layout, shape], shape, geometry.micro_batches)
        for apart in geometry.apart:
            size = apart.worst
            beside = self._forecast(plan, fits[geometry.layout, size], size, geometry.micro_batches)
            found = found.taking(apart.phase, beside, apart.per_step)
        if geometry.evaluation is not None:
            evaluated = geometry.evaluation
            beside = self._forecast(plan, fits[evaluated.layout, evaluated.worst], evaluated.worst, 1)
            found = found.taking(EVALUATE, beside, per_step=0.0)
        return found

    def _forecast(self, plan: TrainingPlan, fit: Fit, shape: Shape, micro_batches: int) -> Forecast:
        return fit.forecast(len(self._layer_kinds), shape, micro_batches, plan.allocator)

    def _fits(self, sized: Sized) -> dict[tuple[Layout, Shape], Fit]:
        """Return the traces of each size that the plan runs at; all are requested at once."""
        plan = sized.plan
        sizes = {
            (geometry.layout, shape): _anchors(geometry, shape)
            for geometry, shape in dict.fromkeys(_sizes(sized.geometry))
        }
        wanted = {
            (size, point): traced
            for size, known in sizes.items()
            for point, traced in traced_points(plan, self._layer_kinds, known).items()
        }
        use = (plan.allocator,)
        requests = [
            trace_request(traced, layout, point[1], point[0], self._setting, self._gpu, use)
            for ((layout, _), point), traced in wanted.items()
        ]
        replies = dict(zip(wanted, self._traces.get(requests), strict=True))
        failed = next((reply for reply in replies.values() if isinstance(reply, Untraceable)), None)
        if failed is not None:
            raise UntraceableError(failed.reason)
        good = {key: reply for key, reply in replies.items() if not isinstance(reply, Untraceable)}
        return {
            size: fit_of(plan, self._layer_kinds, known, {point: good[of, point] for of, point in good if of == size})
            for size, known in sizes.items()
        }


def _sizes(geometry: BatchGeometry) -> Iterator[tuple[BatchGeometry, Shape]]:
    yield from ((geometry, shape) for shape in geometry.shapes)
    yield from ((geometry, apart.worst) for apart in geometry.apart)
    if geometry.evaluation is not None:
        yield geometry.evaluation, geometry.evaluation.worst


def _anchors(geometry: BatchGeometry, shape: Shape) -> Anchors:
    """Return the sizes to trace for one: that one, unless it is a row that takes too long to trace."""
    if geometry.layout is Layout.FLAT and shape.tokens > LONGEST_FLAT:
        return anchors(geometry.layout, [replace(geometry, worst=shape, typical=shape, apart=(), rivals=())])
    return Anchors(Basis.CONSTANT, (shape,))
