"""Chooses which technique combinations to trace, and ranks the candidates by what follows from the traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat

from autotune.core.batch_geometry import BatchGeometry
from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate, MemoryEstimate, Origin, distinct, rank, undecided
from autotune.core.gpu import Gpu
from autotune.core.memory_timeline import MemoryTimeline
from autotune.core.plan import AllocatorUse
from autotune.core.setting import Setting
from autotune.planning.additive.designs import Designs
from autotune.planning.additive.group import Group
from autotune.planning.additive.model import Term
from autotune.planning.cases import Case, Cases, alternatives
from autotune.planning.estimates import Estimates
from autotune.planning.explained import Basis, TracedTerm
from autotune.planning.points import GroupPoints
from autotune.planning.timelines import memory_timeline
from autotune.planning.tracing.store import Traces
from autotune.planning.varied import varied_bytes
from autotune.planning.vllm import engine_of, held, with_vllm
from autotune.probing.tracing import Untraceable
from autotune.techniques.base import OFF
from autotune.techniques.traits import untimed
from autotune.techniques.vllm import NAME as VLLM
from autotune.trainers.problem import TrainerProblem

EXPLORED = 36
"""Technique combinations that are traced before the first ranking. A trace takes about 0.3 s, or 1 s with
several processes, and a combination needs two to seven."""
# Technique combinations that are traced before the ranking is computed again.
_REFINED_AT_ONCE = 4
# Technique combinations that are usually traced after the first ranking: 3 to 10 for the 8B shape.
_USUALLY_REFINED = 8


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
        candidates: the legal candidates that are ranked; :meth:`add` adds to them.
        to_come: about how many traces are needed after those that are being run.
        cut_short: whether :meth:`explore` was ended before it had traced all that it selected.
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
        self.to_come = 0
        self.cut_short = False
        self._cases = cases = Cases(problem, (*self.candidates, problem.baseline))
        self._estimates = Estimates(cases, len(layer_kinds), target.gpu)
        self._points = GroupPoints(problem, cases, layer_kinds, target.gpu or target.cpu)
        recipes = [cases.group(recipe) for recipe in problem.recipes if recipe in cases.geometries]
        self._untimed: dict[Group, bool] = {}
        self._designs = Designs(cases.groups, cases.group(problem.baseline), recipes)
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
        self, limit: int = EXPLORED, *, at_once: Sequence[int] = (1 << 16,), goes_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Trace technique combinations so that every candidate can be estimated: the baseline's, then those of the
        recipes, then the most informative.

        Args:
            limit: about how many technique combinations to trace.
            at_once: how many are traced between two calls of ``goes_on``; the last number is used again and again.
            goes_on: returns whether to continue.
        """
        sizes = chain(at_once, repeat(at_once[-1]))
        total = min(limit, len(self._cases.groups))
        for groups in self._designs.wanted(self._estimates.fits, self._largest_need, limit):
            left = groups
            while left:
                if not goes_on():
                    self.cut_short = True
                    return
                size = next(sizes)
                portion, left = left[:size], left[size:]
                done = len(self._estimates.fits) + len(self.untraceable) + len(portion)
                self._expect(max(len(left), total - done) + _USUALLY_REFINED)
                self._trace(portion)

    def group(self, candidate: Candidate) -> Group:
        """Return the technique combination of a candidate, whose traces others of it share."""
        return self._cases.group(candidate)

    def widened(self, problem: TrainerProblem, further: Iterable[Candidate]) -> Planner:
        """Return a planner of a wider problem that knows what this one does, and traces further candidates."""
        candidates = dict.fromkeys((*self.candidates, *further))
        wide = Planner(problem, self._target, self._traces, self._layer_kinds, candidates)
        # What was traced is not traced again.
        wide._trace([group for group in self._estimates.fits if group in wide._cases.groups])
        wide.trace(further)
        return wide

    def trace(self, candidates: Iterable[Candidate]) -> None:
        """Trace the technique combinations of candidates in their normal form, as far as they were not traced yet."""
        self._trace(list(map(self._cases.admit, candidates)))

    def add(self, candidates: Iterable[Candidate]) -> None:
        """Add legal candidates in their normal form to those that are ranked, and trace their combinations."""
        further = tuple(candidates)
        self.candidates = tuple(dict.fromkeys((*self.candidates, *further)))
        self.trace(further)

    def _largest_need(self, group: Group) -> int:
        geometries = [item for item in self._cases.geometries_of(group.micro_batches) if item.layout is group.layout]
        largest = max(geometries, key=lambda geometry: geometry.worst.rows * geometry.worst.tokens)
        return self._estimates.forecast(group, largest)[0].peak_bytes

    def refine(
        self,
        wanted: Callable[[Sequence[Estimate]], Iterable[Estimate]],
        limit: int,
        *,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """Trace the candidates of an answer whose estimates are composed, until none is left or the limit is reached.

        Args:
            wanted: returns, from a ranking, the estimates that the answer consists of, the most important first.
            limit: most technique combinations to trace, unless whether anything fits follows from composed ones alone.
            goes_on: returns whether to continue.
        """
        count = 0
        while True:
            ranked = self.ranked()
            if count >= limit and not undecided(ranked):
                return
            asked = [found for found in wanted(ranked) if found.origin is not Origin.TRACED]
            groups = list(dict.fromkeys(self._cases.group(found.candidate) for found in asked))
            groups = [group for group in groups if group not in self.untraceable]
            portion = groups[: max(1, min(limit - count, _REFINED_AT_ONCE))]
            if not portion or not goes_on():
                return
            count += len(portion)
            self._expect(len(groups) - len(portion))
            sums = [(found, self._estimates.sum(self._cases.group(found.candidate))) for found in asked]
            self._trace(portion)
            for estimate, found in sums:
                traced = self.estimate(estimate.candidate)
                if found is not None and estimate.memory and traced.memory and traced.origin is Origin.TRACED:
                    self._estimates.compare(found.unseen, estimate.memory, traced.memory)

    def _expect(self, combinations: int) -> None:
        known = len(self._estimates.fits)
        each = self._traces.count / known if known else len(self._points.of(self._cases.group(self._problem.baseline)))
        self.to_come = round(combinations * each)

    def traced(self, count: int) -> tuple[Estimate, ...]:
        """Return the best candidates of the combinations that were traced so far, one of each."""
        found = [item for item in self.candidates if self._cases.group(item) in self._estimates.fits]
        best: dict[Group, Estimate] = {}
        for estimate in sorted(map(self.estimate, found), key=rank):
            best.setdefault(self._cases.group(estimate.candidate), estimate)
        return distinct(best.values(), count)

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
        group = self._cases.group_at(candidate, geometry)
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
        memory = self._with_known_time(memory, candidate)
        rate = geometry.tokens_per_step / memory.step_seconds if memory.step_seconds else None
        spare_bytes = self._target.budget_bytes - memory.device_bytes
        return Estimate(candidate, origin, memory, rate, spare_bytes)

    def traced_estimate(self, candidate: Candidate) -> Estimate:
        """Return the estimate of any candidate, of the space or not, from traces of its own technique combination."""
        found = self.estimate(candidate)
        if found.origin is Origin.TRACED:
            return found
        alone = Planner(self._problem, self._target, self._traces, self._layer_kinds, [candidate])
        alone.trace(alone.candidates)
        return alone.estimate(candidate)

    def training(self, candidate: Candidate) -> MemoryEstimate | None:
        """Return the estimate of a candidate without what vLLM holds beside it, or None if there is none."""
        case = self._decisive(candidate), self._cases.use(candidate)
        found = self._estimates.estimate(self._cases.group(candidate), *case)
        return found and self._with_known_time(found[0], candidate)

    def _with_known_time(self, memory: MemoryEstimate, candidate: Candidate) -> MemoryEstimate:
        """Return an estimate without its time if that is not predicted."""
        group, setting = self._cases.group(candidate), self._problem.setting
        if group not in self._untimed:
            plan = self._problem.trainer.plan(candidate, setting)
            self._untimed[group] = untimed(plan, setting.machine.hardware)
        return replace(memory, step_seconds=None) if self._untimed[group] else memory

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
        requests = {point: self._points.request(term.group, point) for point in self._points.of(term.group)}
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
        group, use = self._cases.group_at(candidate, geometry), self._cases.use(candidate)

        def need(each: BatchGeometry) -> int:
            found = self._estimates.estimate(group, each, use)
            return found[0].device_bytes if found is not None else 0

        return geometry if not geometry.rivals else max(alternatives(geometry), key=need)

    def _trace(self, asked: Iterable[Group]) -> None:
        fits, untraceable = self._estimates.fits, self._estimates.untraceable
        known = fits.keys() | untraceable.keys()
        every = [item for group in asked for item in (group, *self._cases.evaluated.get(group, ()))]
        groups = [group for group in dict.fromkeys(every) if group not in known]
        wanted = {group: self._points.of(group) for group in groups}
        requests = {(group, point): self._points.request(group, point) for group in groups for point in wanted[group]}
        found = dict(zip(requests, self._traces.get(list(requests.values())), strict=True))
        for group in groups:
            replies = {point: found[group, point] for point in wanted[group]}
            failed = next((reply for reply in replies.values() if isinstance(reply, Untraceable)), None)
            if failed is not None:
                untraceable[group] = failed.reason
                continue
            good = {point: reply for point, reply in replies.items() if not isinstance(reply, Untraceable)}
            fits[group] = self._points.fit(group, good)
        self._estimates.learn(self._designs.interacting(fits, self._largest_need))
