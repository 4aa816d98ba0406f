"""Estimates memory and time of candidates: requests the traces, extrapolates them, and states the error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.core.batch_geometry import BatchGeometry, Layout, Shape
from autotune.core.candidate import Candidate, Choice
from autotune.core.estimate import Estimate, MemoryEstimate, Origin, rank
from autotune.core.gpu import Gpu
from autotune.core.plan import AllocatorUse, TrainingPlan
from autotune.core.program import EVALUATE
from autotune.core.protocol import TraceRequest
from autotune.core.setting import Setting
from autotune.planning.additive.design import Design
from autotune.planning.additive.group import Group, group_of
from autotune.planning.additive.model import AdditiveModel, Sum, Term
from autotune.planning.explained import Basis, TracedTerm
from autotune.planning.extrapolation.anchors import anchors
from autotune.planning.extrapolation.depth import traced_depths
from autotune.planning.extrapolation.fit import DEFAULT_USE, Fit, Point, points
from autotune.planning.extrapolation.forecast import Forecast, mixed
from autotune.planning.extrapolation.memory import TRACED_ERROR, memory_estimate
from autotune.planning.extrapolation.shape import Anchors
from autotune.planning.requests import trace_request
from autotune.planning.tracing.store import Traces
from autotune.planning.varied import varied_bytes
from autotune.planning.vllm import with_vllm
from autotune.probing.tracing import Untraceable
from autotune.techniques.base import OFF
from autotune.techniques.traits import allocator_knobs, geometry_knobs, layer_period
from autotune.techniques.vllm import NAME as VLLM
from autotune.trainers.evaluation import whole_geometry
from autotune.trainers.problem import TrainerProblem

COMPOSED_ERRORS = (0.15, 2.0)
"""Errors of composed estimates, as shares: if no interaction is unseen, and if at least one is (:attr:`Sum.unseen`).

Of 28 composed estimates of an 8B shape that were compared with full-size traces (benchmarks/plan/accuracy.md), the 6 of
the first kind were up to 3 % off; half of the 22 others were up to 2.3 % off, and the worst 190 %, where offloading
removes what other choices add.
"""

EXPLORED = 36
"""Technique combinations that are traced before the first ranking. A trace takes about 0.3 s, a combination needs five
to seven traces."""
# Technique combinations that are traced before the ranking is computed again.
_REFINED_AT_ONCE = 4


_Case = tuple[Group, BatchGeometry, AllocatorUse]
"""What an estimate follows from: a technique combination, its micro-batches, and how the allocator is used."""


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
        self._geometries: dict[Candidate, BatchGeometry] = {}
        self._by_sizes: dict[tuple[Choice, ...], BatchGeometry] = {}
        self._geometry_knobs = geometry_knobs()
        self._uses: dict[tuple[Choice, ...], AllocatorUse] = {}
        self._allocator_knobs = allocator_knobs()
        self._groups: dict[Group, Candidate] = {}
        # Groups whose traces only serve the evaluation of others, which has another layout than their training.
        self._evaluated: dict[Group, dict[Group, Candidate]] = {}
        for candidate in (*self.candidates, problem.baseline):
            geometry, _ = self._geometry(candidate), self._use(candidate)
            group = group_of(candidate, geometry.layout)
            self._groups.setdefault(group, candidate)
            if geometry.evaluation is not None and geometry.evaluation.layout is not geometry.layout:
                beside = group_of(candidate, geometry.evaluation.layout)
                self._evaluated.setdefault(group, {})[beside] = candidate
        geometries = set(self._geometries.values())
        # Only the largest micro-batch of evaluation is extrapolated to.
        geometries |= {replace(each, typical=each.worst) for item in geometries if (each := item.evaluation)}
        self._anchors: Mapping[Layout, Anchors] = {
            layout: anchors(layout, geometries) for layout in {geometry.layout for geometry in geometries}
        }
        recipes = [self._group(recipe) for recipe in problem.recipes if recipe in self._geometries]
        self._design = Design(self._groups, self._group(problem.baseline), recipes)
        self._fits: dict[Group, Fit] = {}
        self._untraceable: dict[Group, str] = {}
        self._additive = AdditiveModel(())
        self._forecasts: dict[_Case, tuple[MemoryEstimate, Origin] | None] = {}
        self._traced_forecasts: dict[_Case, tuple[Forecast, Forecast]] = {}
        self._composed: dict[tuple[Sum, float, BatchGeometry, AllocatorUse], MemoryEstimate] = {}
        self._differences: dict[int, list[float]] = {}
        self._varied: dict[_Case, int | None] = {}

    def composed_error(self, unseen: int) -> float:
        """Return the error of composed estimates with that many unseen interactions, as a share.

        It is the largest error observed in this run if that exceeds :data:`COMPOSED_ERRORS`.
        """
        place = _place(unseen)
        return max(COMPOSED_ERRORS[place], *self._differences.get(place, ()), 0.0)

    @property
    def misaligned(self) -> int:
        """Number of technique combinations whose traces could not be aligned moment by moment."""
        return sum(not fit.aligned for fit in self._fits.values())

    @property
    def assumptions(self) -> Sequence[str]:
        """What traces assumed where a step depends on the values of real data, in sentences."""
        return sorted({assumed for fit in self._fits.values() for assumed in fit.assumptions})

    @property
    def untraceable(self) -> Mapping[Group, str]:
        """The reason why each technique combination that failed could not be traced."""
        return self._untraceable

    def explore(
        self, limit: int = EXPLORED, *, at_once: int = 1 << 16, goes_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Trace technique combinations so that every candidate can be estimated, the most informative first.

        Args:
            limit: about how many technique combinations to trace.
            at_once: how many are traced between two calls of ``goes_on``.
            goes_on: returns whether to continue.
        """
        for groups in self._design.wanted(self._fits, self._largest_need, limit):
            for first in range(0, len(groups), at_once):
                if not goes_on():
                    return
                self._trace(groups[first : first + at_once])

    def trace(self, candidates: Iterable[Candidate]) -> None:
        """Trace the technique combinations of candidates of the space, as far as they were not traced yet."""
        self._trace([group for group in map(self._group, candidates) if group in self._groups])

    def _largest_need(self, group: Group) -> int:
        geometries = (geometry for geometry in self._geometries.values() if geometry.layout is group.layout)
        return self._forecast(group, max(geometries, key=lambda geometry: geometry.worst.rows * geometry.worst.tokens))[
            0
        ].peak_bytes

    def refine(self, places: int, limit: int) -> None:
        """Trace the best candidates whose estimates are composed, until all are traced or the limit is reached."""
        while limit > 0:
            best = self.ranked()[:places]
            wanted = [estimate.candidate for estimate in best if estimate.origin is not Origin.TRACED]
            groups = list(dict.fromkeys(self._group(candidate) for candidate in wanted))
            groups = [group for group in groups if group not in self._untraceable][: min(limit, _REFINED_AT_ONCE)]
            if not groups:
                return
            limit -= len(groups)
            before = [estimate for estimate in best if self._group(estimate.candidate) in groups]
            seen_before = self._additive
            self._trace(groups)
            for estimate in before:
                self._compare(estimate, seen_before.sum(self._group(estimate.candidate)))

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
        geometry, use = self._decisive(candidate, setting), self._use(candidate)
        group = group_of(candidate, geometry.layout)
        found = self._known(group, geometry, use)
        if found is None:
            reason = self._untraceable.get(group, "a technique of it was never traced")
            return Estimate(candidate, Origin.UNKNOWN, reason=reason)
        memory, origin = replace(found[0], varied_bytes=self._varied.get((group, geometry, use))), found[1]
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
        found = self._known(self._group(candidate), self._decisive(candidate), self._use(candidate))
        return found and found[0]

    def basis(self, candidate: Candidate) -> Basis:
        """Return what the estimate of a candidate is made from: what was traced is the only term of its own sum."""
        geometry, group = self._decisive(candidate), self._group(candidate)
        found = self._additive.sum(group) if group not in self._untraceable else None
        use = self._use(candidate)
        terms = [self._term(term, geometry, use) for term in found.terms] if found is not None else []
        return Basis(geometry, len(self._layer_kinds), use, tuple(terms))

    def _term(self, term: Term, geometry: BatchGeometry, use: AllocatorUse) -> TracedTerm:
        requests = {point: self._request(term.group, point) for point in self._points(term.group)}
        forecasts = self._forecast(term.group, geometry, use)
        return TracedTerm(term.group, term.weight, self._fits[term.group], requests, *forecasts)

    def vary(self, candidate: Candidate) -> None:
        """Trace what micro-batches of varied lengths add to a candidate; its later estimates include it."""
        geometry, group = self._decisive(candidate), self._group(candidate)
        equal = geometry.typical == geometry.worst
        plan = self._problem.trainer.plan(candidate, self._problem.setting)
        request = plan, geometry.layout, geometry.worst, len(self._layer_kinds), self._problem.setting
        known = 0 if equal else varied_bytes(self._traces, *request, self._target.gpu)
        self._varied[group, geometry, plan.allocator] = known

    def _geometry(self, candidate: Candidate) -> BatchGeometry:
        if candidate not in self._geometries:
            # Only the knobs that set sizes decide the geometry, so it is computed once for each of their combinations.
            sizes = tuple(choice for knob, choice in candidate.items() if knob in self._geometry_knobs)
            if sizes not in self._by_sizes:
                self._by_sizes[sizes] = self._geometry_in(candidate, self._problem.setting)
            self._geometries[candidate] = self._by_sizes[sizes]
        return self._geometries[candidate]

    def _use(self, candidate: Candidate) -> AllocatorUse:
        chosen = tuple(choice for knob, choice in candidate.items() if knob in self._allocator_knobs)
        if chosen not in self._uses:
            self._uses[chosen] = self._problem.trainer.plan(candidate, self._problem.setting).allocator
        return self._uses[chosen]

    def _geometry_in(self, candidate: Candidate, setting: Setting) -> BatchGeometry:
        trainer = self._problem.trainer
        return whole_geometry(trainer, trainer.plan(candidate, setting), setting.workload)

    def _decisive(self, candidate: Candidate, setting: Setting | None = None) -> BatchGeometry:
        """Return the geometry of a candidate with the one of its worst shapes that needs the most memory."""
        setting = setting or self._problem.setting
        known = setting is self._problem.setting
        geometry = self._geometry(candidate) if known else self._geometry_in(candidate, setting)
        group, use = group_of(candidate, geometry.layout), self._use(candidate)
        if not geometry.rivals:
            return geometry

        def need(shape: Shape) -> int:
            found = self._known(group, replace(geometry, worst=shape, rivals=()), use)
            return found[0].device_bytes if found is not None else 0

        return replace(geometry, worst=max(geometry.shapes, key=need), rivals=())

    def _known(self, group: Group, geometry: BatchGeometry, use: AllocatorUse) -> tuple[MemoryEstimate, Origin] | None:
        """Return the estimate of a group, computed once between two traces."""
        key = (group, geometry, use)
        if key not in self._forecasts:
            self._forecasts[key] = self._estimate(*key)
        return self._forecasts[key]

    def _group(self, candidate: Candidate) -> Group:
        return group_of(candidate, self._geometry(candidate).layout)

    def _trace(self, asked: Iterable[Group]) -> None:
        known = self._fits.keys() | self._untraceable.keys()
        every = [item for group in asked for item in (group, *self._evaluated.get(group, ()))]
        groups = [group for group in dict.fromkeys(every) if group not in known]
        wanted = {group: self._points(group) for group in groups}
        requests = {(group, point): self._request(group, point) for group in groups for point in wanted[group]}
        found = dict(zip(requests, self._traces.get(list(requests.values())), strict=True))
        for group in groups:
            replies = {point: found[group, point] for point in wanted[group]}
            failed = next((reply for reply in replies.values() if isinstance(reply, Untraceable)), None)
            if failed is not None:
                self._untraceable[group] = failed.reason
                continue
            good = {point: reply for point, reply in replies.items() if not isinstance(reply, Untraceable)}
            self._fits[group] = Fit(self._anchors[group.layout], good)
        effects = self._design.effects(self._fits, self._largest_need)
        interacting = {level for found in effects.values() for level in found}
        self._additive = AdditiveModel(tuple(self._fits), interacting)
        self._forecasts.clear()

    def _request(self, group: Group, point: Point) -> TraceRequest:
        timed = self._target.gpu or self._target.cpu
        return trace_request(self._plan(group), group.layout, point[1], point[0], self._problem.setting, timed)

    def _points(self, group: Group) -> list[Point]:
        return points(depths_of(self._plan(group), self._layer_kinds), self._anchors[group.layout])

    def _plan(self, group: Group) -> TrainingPlan:
        candidate = self._groups.get(group)
        if candidate is None:
            candidate = next(beside[group] for beside in self._evaluated.values() if group in beside)
        return self._problem.trainer.plan(candidate, self._problem.setting)

    def _compare(self, composed: Estimate, found: Sum | None) -> None:
        """Record the error of a composed estimate whose technique combination has been traced since."""
        traced = self.estimate(composed.candidate)
        if found is not None and composed.memory and traced.memory and traced.origin is Origin.TRACED:
            off = abs(composed.memory.device_bytes / traced.memory.device_bytes - 1)
            self._differences.setdefault(_place(found.unseen), []).append(off)

    def _estimate(
        self, group: Group, geometry: BatchGeometry, use: AllocatorUse
    ) -> tuple[MemoryEstimate, Origin] | None:
        if group in self._fits:
            return memory_estimate(
                *self._forecast(group, geometry, use), geometry.micro_batches, self._target.gpu, TRACED_ERROR
            ), Origin.TRACED
        found = self._additive.sum(group) if group not in self._untraceable else None
        if found is None:
            return None
        # Further traces leave most sums unchanged, so their estimates are kept.
        key = (found, self.composed_error(found.unseen), geometry, use)
        if key not in self._composed:
            # Tensors are added up once for all uses of the allocator; other candidates have those.
            worst = typical = None
            for each in {use, *self._uses.values()}:
                worst, typical = self._sum(found, geometry, each, worst, typical)
                memory = memory_estimate(worst, typical, geometry.micro_batches, self._target.gpu, key[1])
                self._composed[found, key[1], geometry, each] = memory
        return self._composed[key], Origin.COMPOSED

    def _sum(
        self,
        found: Sum,
        geometry: BatchGeometry,
        use: AllocatorUse,
        worst_alike: Forecast | None,
        typical_alike: Forecast | None,
    ) -> tuple[Forecast, Forecast]:
        """Return the sums of forecasts for a use of the allocator, from those for another one."""
        forecasts = [(self._forecast(term.group, geometry, use), term.weight) for term in found.terms]
        worst = mixed([(pair[0], weight) for pair, weight in forecasts], worst_alike)
        if geometry.typical == geometry.worst:
            return worst, worst
        return worst, mixed([(pair[1], weight) for pair, weight in forecasts], typical_alike)

    def _forecast(
        self, group: Group, geometry: BatchGeometry, use: AllocatorUse = DEFAULT_USE
    ) -> tuple[Forecast, Forecast]:
        """Return the forecasts of the largest and of a typical micro-batch for a traced group."""
        key = (group, geometry, use)
        if key not in self._traced_forecasts:
            self._traced_forecasts[key] = self._follow(*key)
        return self._traced_forecasts[key]

    def _follow(self, group: Group, geometry: BatchGeometry, use: AllocatorUse) -> tuple[Forecast, Forecast]:
        fit, layers = self._fits[group], len(self._layer_kinds)

        def at(shape: Shape) -> Forecast:
            return fit.forecast(layers, shape, geometry.micro_batches, use)

        worst = at(geometry.worst)
        typical = worst if geometry.typical == geometry.worst else at(geometry.typical)
        for apart in geometry.apart:
            worst = worst.taking(apart.phase, at(apart.worst), apart.per_step)
            typical = typical.taking(apart.phase, at(apart.typical), apart.per_step)
        if geometry.evaluation is not None:
            beside = self._fits.get(Group(group.choices, geometry.evaluation.layout), fit)
            worst = worst.taking(EVALUATE, beside.forecast(layers, geometry.evaluation.worst, 1, use), per_step=0.0)
        return worst, typical


def depths_of(plan: TrainingPlan, layer_kinds: Sequence[str]) -> tuple[int, ...]:
    """Return the depths at which a plan is traced, given the period of layers over which its techniques repeat."""
    return traced_depths(layer_kinds, layer_period(plan))


def _place(unseen: int) -> int:
    return min(unseen, len(COMPOSED_ERRORS) - 1)
