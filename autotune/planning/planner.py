"""Chooses which technique combinations to trace, and ranks the candidates by what follows from the traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.core.batch_geometry import BatchGeometry, Layout
from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate, MemoryEstimate, Origin, rank
from autotune.core.gpu import Gpu
from autotune.core.memory_timeline import MemoryTimeline
from autotune.core.plan import AllocatorUse, TrainingPlan
from autotune.core.protocol import TraceRequest
from autotune.core.setting import Setting
from autotune.planning.additive.design import Design
from autotune.planning.additive.group import Group, group_of
from autotune.planning.additive.model import Term
from autotune.planning.cases import Case, Cases, alternatives
from autotune.planning.estimates import Estimates
from autotune.planning.explained import Basis, TracedTerm
from autotune.planning.extrapolation.anchors import anchors
from autotune.planning.extrapolation.depth import traced_depths
from autotune.planning.extrapolation.fit import Fit, Point, points
from autotune.planning.extrapolation.shape import Anchors
from autotune.planning.requests import trace_request
from autotune.planning.timelines import memory_timeline
from autotune.planning.tracing.store import Traces
from autotune.planning.varied import varied_bytes
from autotune.planning.vllm import engine_of, held, with_vllm
from autotune.probing.tracing import Untraceable
from autotune.techniques.base import OFF
from autotune.techniques.traits import layer_period
from autotune.techniques.vllm import NAME as VLLM
from autotune.trainers.problem import TrainerProblem

EXPLORED = 36
"""Technique combinations that are traced before the first ranking. A trace takes about 0.3 s, a combination needs five
to seven traces."""
# Technique combinations that are traced before the ranking is computed again.
_REFINED_AT_ONCE = 4


@dataclass(frozen=True)
class Accelerator:
    """The device that estimates are for.

    Attributes:
        gpu: the GPU, or None for a CPU.
        budget_bytes: memory that training may need.
        cpu: a CPU whose speeds were measured; None if no times are to be predicted on the CPU.
    """

    gpu: Gpu | None
    budget_bytes: int
    cpu: Gpu | None = None


class Planner:
    """Estimates candidates of one problem on one target.

    First :meth:`explore`, then :meth:`refine`, then :meth:`ranked`; :meth:`trace` and :meth:`estimate` may be called at
    any time. An estimate is traced if the candidate's technique combination was traced, composed by the additive model
    if its levels were traced in other combinations, and unknown otherwise.

    Attributes:
        candidates: the legal candidates.
    """

    def __init__(
        self,
        problem: TrainerProblem,
        target: Accelerator,
        traces: Traces,
        layer_kinds: Sequence[str],
        candidates: Iterable[Candidate],
    ) -> None:
        self._problem = problem
        self._target = target
        self._traces = traces
        self._layer_kinds = layer_kinds
        self.candidates = tuple(candidates)
        self._cases = cases = Cases(problem, (*self.candidates, problem.baseline))
        self._estimates = Estimates(cases, len(layer_kinds), target.gpu)
        geometries = set(cases.geometries.values())
        # Only the largest micro-batch of evaluation is extrapolated to.
        geometries |= {replace(each, typical=each.worst) for item in geometries if (each := item.evaluation)}
        self._anchors: Mapping[Layout, Anchors] = {
            layout: anchors(layout, geometries) for layout in {geometry.layout for geometry in geometries}
        }
        recipes = [cases.group(recipe) for recipe in problem.recipes if recipe in cases.geometries]
        self._design = Design(cases.groups, cases.group(problem.baseline), recipes)
        self._varied: dict[tuple[Group, Case], int | None] = {}

    @property
    def misaligned(self) -> int:
        """Number of technique combinations whose traces could not be aligned moment by moment."""
        return sum(not fit.aligned for fit in self._estimates.fits.values())

    @property
    def assumptions(self) -> Sequence[str]:
        """What traces assumed where a step depends on the values of real data, in sentences."""
        return sorted({assumed for fit in self._estimates.fits.values() for assumed in fit.assumptions})

    @property
    def untraceable(self) -> Mapping[Group, str]:
        """The reason why each technique combination that failed could not be traced."""
        return self._estimates.untraceable

    def explore(
        self, limit: int = EXPLORED, *, at_once: int = 1 << 16, goes_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Trace technique combinations so that every candidate can be estimated, the most informative first.

        Args:
            limit: about how many technique combinations to trace.
            at_once: how many are traced between two calls of ``goes_on``.
            goes_on: returns whether to continue.
        """
        for groups in self._design.wanted(self._estimates.fits, self._largest_need, limit):
            for first in range(0, len(groups), at_once):
                if not goes_on():
                    return
                self._trace(groups[first : first + at_once])

    def trace(self, candidates: Iterable[Candidate]) -> None:
        """Trace the technique combinations of candidates of the space, as far as they were not traced yet."""
        self._trace([group for group in map(self._cases.group, candidates) if group in self._cases.groups])

    def _largest_need(self, group: Group) -> int:
        geometries = [item for item in self._cases.geometries.values() if item.layout is group.layout]
        largest = max(geometries, key=lambda geometry: geometry.worst.rows * geometry.worst.tokens)
        return self._estimates.forecast(group, largest)[0].peak_bytes

    def refine(self, places: int, limit: int) -> None:
        """Trace the best candidates whose estimates are composed, until all are traced or the limit is reached."""
        while limit > 0:
            best = self.ranked()[:places]
            wanted = [estimate.candidate for estimate in best if estimate.origin is not Origin.TRACED]
            groups = list(dict.fromkeys(map(self._cases.group, wanted)))
            groups = [group for group in groups if group not in self.untraceable][: min(limit, _REFINED_AT_ONCE)]
            if not groups:
                return
            limit -= len(groups)
            composed = [(estimate, self._cases.group(estimate.candidate)) for estimate in best]
            sums = [(estimate, self._estimates.sum(group)) for estimate, group in composed if group in groups]
            self._trace(groups)
            for estimate, found in sums:
                traced = self.estimate(estimate.candidate)
                if found is not None and estimate.memory and traced.memory and traced.origin is Origin.TRACED:
                    self._estimates.compare(found.unseen, estimate.memory, traced.memory)

    def ranked(self) -> list[Estimate]:
        """Return estimates of all candidates.

        Candidates that fit come first, the fastest first; then those that do not fit, the least memory first; then
        those without an estimate.
        """
        return sorted(map(self.estimate, self.candidates), key=rank)

    def estimate(self, candidate: Candidate, setting: Setting | None = None) -> Estimate:
        """Return the estimate of a candidate in its normal form, which need not be in the problem's space.

        Args:
            setting: the problem's, or the same with a part of its rows, whose shapes lie between those of all rows.
        """
        setting = setting or self._problem.setting
        geometry, use = self._decisive(candidate, setting), self._cases.use(candidate)
        group = group_of(candidate, geometry.layout)
        found = self._estimates.estimate(group, geometry, use)
        if found is None:
            reason = self.untraceable.get(group, "a technique of it was never traced")
            return Estimate(candidate, Origin.UNKNOWN, reason=reason)
        memory, origin = replace(found[0], varied_bytes=self._varied.get((group, (geometry, use)))), found[1]
        if candidate.get(VLLM, OFF) != OFF:
            shared = with_vllm(memory, self._problem.trainer.plan(candidate, setting), setting)
            if isinstance(shared, str):
                return Estimate(candidate, Origin.UNKNOWN, reason=shared)
            memory = shared
        rate = geometry.tokens * geometry.micro_batches / memory.step_seconds if memory.step_seconds else None
        spare_bytes = self._target.budget_bytes - memory.device_bytes
        return Estimate(candidate, origin, memory, rate, spare_bytes)

    def training(self, candidate: Candidate) -> MemoryEstimate | None:
        """Return the estimate of a candidate without what vLLM holds beside it, or None if there is none."""
        found = self._estimates.estimate(
            self._cases.group(candidate), self._decisive(candidate), self._cases.use(candidate)
        )
        return found and found[0]

    def timeline(self, candidate: Candidate) -> MemoryTimeline | None:
        """Return the memory of a candidate through one step, from the traces of its estimate; None without one."""
        training, found = self.training(candidate), self.estimate(candidate)
        group, geometry = self._cases.group(candidate), self._decisive(candidate)
        courses = self._estimates.courses(group, geometry)
        if training is None or found.memory is None or courses is None:
            return None
        model, machine = self._problem.setting.workload.model, self._problem.setting.machine
        engine = engine_of(self._problem.trainer.plan(candidate, self._problem.setting), model)
        traced = found.origin is Origin.TRACED
        return memory_timeline(
            courses,
            training,
            found.memory,
            micro_batches=geometry.micro_batches,
            traced=traced,
            followed=traced and self._estimates.fits[group].aligned,
            vllm=(0, 0) if engine is None else held(engine, model, machine.hardware.memory_bytes),
        )

    def basis(self, candidate: Candidate) -> Basis:
        """Return what the estimate of a candidate is made from: what was traced is the only term of its own sum."""
        geometry, group = self._decisive(candidate), self._cases.group(candidate)
        found, use = self._estimates.sum(group), self._cases.use(candidate)
        terms = [self._term(term, geometry, use) for term in found.terms] if found is not None else []
        return Basis(geometry, len(self._layer_kinds), use, tuple(terms))

    def _term(self, term: Term, geometry: BatchGeometry, use: AllocatorUse) -> TracedTerm:
        requests = {point: self._request(term.group, point) for point in self._points(term.group)}
        forecasts = self._estimates.forecast(term.group, geometry, use)
        return TracedTerm(term.group, term.weight, self._estimates.fits[term.group], requests, *forecasts)

    def vary(self, candidate: Candidate) -> None:
        """Trace what micro-batches of varied lengths add to a candidate; its later estimates include it."""
        geometry, group = self._decisive(candidate), self._cases.group(candidate)
        equal = geometry.typical == geometry.worst
        plan = self._problem.trainer.plan(candidate, self._problem.setting)
        request = plan, geometry.layout, geometry.worst, len(self._layer_kinds), self._problem.setting
        known = 0 if equal else varied_bytes(self._traces, *request, self._target.gpu)
        self._varied[group, (geometry, plan.allocator)] = known

    def _decisive(self, candidate: Candidate, setting: Setting | None = None) -> BatchGeometry:
        """Return the geometry of a candidate with the one of its worst shapes that needs the most memory."""
        geometry = self._cases.geometry(candidate, setting)
        group, use = group_of(candidate, geometry.layout), self._cases.use(candidate)

        def need(each: BatchGeometry) -> int:
            found = self._estimates.estimate(group, each, use)
            return found[0].device_bytes if found is not None else 0

        return geometry if not geometry.rivals else max(alternatives(geometry), key=need)

    def _trace(self, asked: Iterable[Group]) -> None:
        fits, untraceable = self._estimates.fits, self._estimates.untraceable
        known = fits.keys() | untraceable.keys()
        every = [item for group in asked for item in (group, *self._cases.evaluated.get(group, ()))]
        groups = [group for group in dict.fromkeys(every) if group not in known]
        wanted = {group: self._points(group) for group in groups}
        requests = {(group, point): self._request(group, point) for group in groups for point in wanted[group]}
        found = dict(zip(requests, self._traces.get(list(requests.values())), strict=True))
        for group in groups:
            replies = {point: found[group, point] for point in wanted[group]}
            failed = next((reply for reply in replies.values() if isinstance(reply, Untraceable)), None)
            if failed is not None:
                untraceable[group] = failed.reason
                continue
            good = {point: reply for point, reply in replies.items() if not isinstance(reply, Untraceable)}
            fits[group] = Fit(self._anchors[group.layout], good)
        effects = self._design.effects(fits, self._largest_need)
        self._estimates.learn(level for found in effects.values() for level in found)

    def _request(self, group: Group, point: Point) -> TraceRequest:
        timed = self._target.gpu or self._target.cpu
        at = group.layout, point[1], point[0]
        return trace_request(self._plan(group), *at, self._problem.setting, timed, self._cases.uses)

    def _points(self, group: Group) -> list[Point]:
        return points(depths_of(self._plan(group), self._layer_kinds), self._anchors[group.layout])

    def _plan(self, group: Group) -> TrainingPlan:
        candidate = self._cases.groups.get(group)
        if candidate is None:
            candidate = next(beside[group] for beside in self._cases.evaluated.values() if group in beside)
        return self._problem.trainer.plan(candidate, self._problem.setting)


def depths_of(plan: TrainingPlan, layer_kinds: Sequence[str]) -> tuple[int, ...]:
    """Return the depths at which a plan is traced, given the period of layers over which its techniques repeat."""
    return traced_depths(layer_kinds, layer_period(plan))
