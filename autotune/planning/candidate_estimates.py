"""Estimates candidates from what was traced so far: with what vLLM holds beside them, and through one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune.core.batch_geometry import BatchGeometry
from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate, MemoryEstimate, Origin
from autotune.core.memory_timeline import MemoryTimeline
from autotune.core.plan import AllocatorUse
from autotune.core.setting import Setting
from autotune.planning.additive.group import Group
from autotune.planning.additive.model import Term
from autotune.planning.cases import Case, Cases, alternatives
from autotune.planning.estimates import Estimates
from autotune.planning.explained import Basis, TracedTerm
from autotune.planning.own_sizes import OwnSizes
from autotune.planning.points import GroupPoints
from autotune.planning.target import Accelerator
from autotune.planning.timelines import memory_timeline
from autotune.planning.tracing.store import Traces
from autotune.planning.varied import varied_bytes
from autotune.planning.vllm import engine_of, held, with_vllm
from autotune.probing.tracing import Untraceable
from autotune.techniques.base import OFF
from autotune.techniques.traits import untimed
from autotune.techniques.vllm import NAME as VLLM
from autotune.trainers.problem import TrainerProblem


class CandidateEstimates:
    """The estimates of a problem's candidates: from traces at their own sizes, or else from those of their technique
    combinations.

    Args:
        estimates: of technique combinations.
        own: candidates that were traced at their own sizes.
        points: what is traced of a technique combination.
    """

    def __init__(
        self,
        problem: TrainerProblem,
        target: Accelerator,
        traces: Traces,
        layer_kinds: Sequence[str],
        cases: Cases,
        estimates: Estimates,
        own: OwnSizes,
        points: GroupPoints,
    ) -> None:
        self._problem = problem
        self._target = target
        self._traces = traces
        self._layer_kinds = layer_kinds
        self._cases = cases
        self._estimates = estimates
        self._own = own
        self._points = points
        self._untimed: dict[Group, bool] = {}
        self._varied: dict[tuple[Group, Case], int | None] = {}

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the estimate of a candidate in its normal form, which need not be in the problem's space."""
        found = self._training(candidate)
        if found is None:
            reason = self._estimates.untraceable.get(self._cases.group(candidate), "a technique of it was never traced")
            return Estimate(candidate, Origin.UNKNOWN, reason=reason)
        (memory, origin), geometry = found, self._decisive(candidate)
        if self._varied:
            memory = replace(memory, varied_bytes=self._varied.get(self._key(candidate)))
        return self._whole(candidate, self._problem.setting, memory, origin, geometry)

    def _whole(
        self, candidate: Candidate, setting: Setting, memory: MemoryEstimate, origin: Origin, geometry: BatchGeometry
    ) -> Estimate:
        """Return the estimate that a training comes to with what vLLM holds beside it."""
        if candidate.get(VLLM, OFF) != OFF:
            shared = with_vllm(memory, self._problem.trainer.plan(candidate, setting), setting)
            if isinstance(shared, str):
                return Estimate(candidate, Origin.UNKNOWN, reason=shared)
            memory = shared
        rate = geometry.tokens_per_step / memory.step_seconds if memory.step_seconds else None
        spare_bytes = self._target.budget_bytes - memory.device_bytes
        return Estimate(candidate, origin, memory, rate, spare_bytes)

    def elsewhere(self, candidate: Candidate, setting: Setting) -> Estimate:
        """Return the estimate of a candidate from traces with the rows of another setting."""
        own = self._own.elsewhere(candidate, setting)
        if isinstance(own, Untraceable):
            return Estimate(candidate, Origin.UNKNOWN, reason=own.reason)
        memory = self._with_known_time(own.memory, candidate)
        return self._whole(candidate, setting, memory, Origin.TRACED, own.geometry)

    def training(self, candidate: Candidate) -> MemoryEstimate | None:
        """Return the estimate of a candidate without what vLLM holds beside it, or None if there is none."""
        found = self._training(candidate)
        return found and found[0]

    def _training(self, candidate: Candidate) -> tuple[MemoryEstimate, Origin] | None:
        own = self._own.of(candidate)
        if own is not None:
            return self._with_known_time(own.memory, candidate), Origin.TRACED
        group, geometry = self._cases.group(candidate), self._decisive(candidate)
        found = self._estimates.estimate(group, geometry, self._cases.use(candidate))
        return found and (self._with_known_time(found[0], candidate), found[1])

    def _with_known_time(self, memory: MemoryEstimate, candidate: Candidate) -> MemoryEstimate:
        """Return an estimate without its time if that is not predicted."""
        group, setting = self._cases.group(candidate), self._problem.setting
        if group not in self._untimed:
            plan = self._problem.trainer.plan(candidate, setting)
            self._untimed[group] = untimed(plan, setting.machine.hardware)
        if memory.step_seconds is None:
            return memory
        return replace(memory, step_seconds=None) if self._untimed[group] else memory

    def timeline(self, candidate: Candidate) -> MemoryTimeline | None:
        """Return the memory of a candidate through one step, from the traces of its estimate; None without one."""
        training, found, own = self.training(candidate), self.estimate(candidate), self._own.of(candidate)
        group, geometry = self._cases.group(candidate), self._decisive(candidate)
        fit = own or self._estimates.fits.get(group)
        courses = own.courses() if own is not None else self._estimates.courses(group, geometry)
        if training is None or found.memory is None or courses is None:
            return None
        model, machine = self._problem.setting.workload.model, self._problem.setting.machine
        engine = engine_of(self._problem.trainer.plan(candidate, self._problem.setting), model)
        return memory_timeline(
            courses,
            training,
            found.memory,
            micro_batches=geometry.micro_batches,
            traced=found.origin is Origin.TRACED,
            followed=fit is not None and fit.aligned,
            vllm=(0, 0) if engine is None else held(engine, model, machine.hardware.memory_bytes),
        )

    def basis(self, candidate: Candidate) -> Basis:
        """Return what the estimate of a candidate is made from: what was traced is the only term of its own sum."""
        geometry, group, own = self._decisive(candidate), self._cases.group(candidate), self._own.of(candidate)
        found, use = self._estimates.sum(group), self._cases.use(candidate)
        if own is not None:
            terms = [TracedTerm(group, 1.0, own.fit, own.requests, own.worst, own.typical)]
        else:
            terms = [self._term(term, geometry, use) for term in found.terms] if found is not None else []
        return Basis(geometry, len(self._layer_kinds), use, tuple(terms))

    def _term(self, term: Term, geometry: BatchGeometry, use: AllocatorUse) -> TracedTerm:
        requests = {point: self._points.request(term.group, point) for point in self._points.of(term.group)}
        forecasts = self._estimates.forecast(term.group, geometry, use)
        return TracedTerm(term.group, term.weight, self._estimates.fits[term.group], requests, *forecasts)

    def vary(self, candidate: Candidate) -> None:
        """Trace what micro-batches of varied lengths add to a candidate; its later estimates include it."""
        geometry = self._decisive(candidate)
        equal = geometry.typical == geometry.worst
        plan = self._problem.trainer.plan(candidate, self._problem.setting)
        request = plan, geometry.layout, geometry.worst, len(self._layer_kinds), self._problem.setting
        known = 0 if equal else varied_bytes(self._traces, *request, self._target.gpu)
        self._varied[self._key(candidate)] = known

    def _key(self, candidate: Candidate) -> tuple[Group, Case]:
        return self._cases.group(candidate), (self._decisive(candidate), self._cases.use(candidate))

    def _decisive(self, candidate: Candidate) -> BatchGeometry:
        """Return the geometry of a candidate with the one of its worst shapes that needs the most memory."""
        own = self._own.of(candidate)
        if own is not None:
            return own.geometry
        geometry = self._cases.geometry(candidate)
        if not geometry.rivals:
            return geometry
        group, use = self._cases.group(candidate), self._cases.use(candidate)

        def needed(each: BatchGeometry) -> int:
            found = self._estimates.estimate(group, each, use)
            return found[0].device_bytes if found is not None else 0

        return max(alternatives(geometry), key=needed)
