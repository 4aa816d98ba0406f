"""Estimates of candidates: which traces they need, what follows from them, and how sure that is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate, MemoryEstimate, Origin
from autotune.core.gpu import Gpu
from autotune.core.plan import TrainingPlan
from autotune.planning.composition import Composition, design
from autotune.planning.depth import traced_depths
from autotune.planning.fit import Fit, Forecast, Point
from autotune.planning.groups import Anchors, Group, anchors, group_of, trace_request
from autotune.planning.load import Load, load_of
from autotune.planning.memory import TRACED_ERROR, memory_estimate
from autotune.planning.mixture import mixed
from autotune.planning.shape import Kind
from autotune.planning.traces import Traces, Untraceable
from autotune.trainers.problem import TrainerProblem

COMPOSED_ERROR = 0.35
"""What a composed one may be off by. Against full-size traces of an 8B shape, two were 5 % and one was 33 % off: that
of activation offloading without checkpointing, which share what they save, so that it was an overestimate."""


@dataclass(frozen=True)
class Target:
    """What is planned for.

    Attributes:
        gpu: None for a CPU.
        budget_bytes: memory that training may need.
    """

    gpu: Gpu | None
    budget_bytes: int


def legal_candidates(problem: TrainerProblem) -> tuple[Candidate, ...]:
    """Return every legal candidate of a problem once, in its normal form."""
    knobs = tuple(problem.choices)
    every = (
        Candidate(dict(zip(knobs, choices, strict=True))) for choices in itertools.product(*problem.choices.values())
    )
    normal = dict.fromkeys(problem.normal(candidate) for candidate in every)
    return tuple(candidate for candidate in normal if problem.illegal(candidate) is None)


class Planner:
    """Estimates candidates of one problem on one target.

    Attributes:
        candidates: the legal ones.
        composed_error: share by which composed estimates may be off.
    """

    def __init__(
        self,
        problem: TrainerProblem,
        target: Target,
        traces: Traces,
        layer_kinds: Sequence[str],
        candidates: Iterable[Candidate],
    ) -> None:
        self._problem = problem
        self._target = target
        self._traces = traces
        self._layer_kinds = layer_kinds
        self.candidates = tuple(candidates)
        self._loads: dict[Candidate, Load] = {}
        self._groups: dict[Group, Candidate] = {}
        for candidate in (*self.candidates, problem.baseline):
            load = self._load(candidate)
            self._groups.setdefault(group_of(candidate, load.kind), candidate)
        loads = set(self._loads.values())
        self._anchors: Mapping[Kind, Anchors] = {kind: anchors(kind, loads) for kind in {load.kind for load in loads}}
        self._fits: dict[Group, Fit] = {}
        self._untraceable: dict[Group, str] = {}
        self._composition = Composition(())
        self._forecasts: dict[tuple[Group, Load], tuple[MemoryEstimate, Origin] | None] = {}
        self._traced_forecasts: dict[tuple[Group, Load], tuple[Forecast, Forecast]] = {}
        self._differences: list[float] = []

    @property
    def composed_error(self) -> float:
        """Share by which composed estimates may be off: what was seen here where that is more than was seen before."""
        return max(COMPOSED_ERROR, *self._differences) if self._differences else COMPOSED_ERROR

    @property
    def misaligned(self) -> int:
        """How many ways to train had traces whose moments could not be followed from size to size."""
        return sum(not fit.aligned for fit in self._fits.values())

    @property
    def untraceable(self) -> Mapping[Group, str]:
        """Why ways to train could not be traced."""
        return self._untraceable

    def explore(self, limit: int) -> None:
        """Trace so that every candidate can be estimated, on at most about ``limit`` ways to train."""
        base = self._group(self._problem.baseline)
        recipes = [self._group(candidate) for candidate in self._problem.recipes if candidate in self._loads]
        self._trace(design(base, self._groups, recipes, limit))

    def refine(self, places: int, limit: int) -> None:
        """Trace those among the best candidates that are composed, until there are none or the limit is reached."""
        while limit > 0:
            best = self.ranked()[:places]
            wanted = [estimate.candidate for estimate in best if estimate.origin is not Origin.TRACED]
            groups = list(dict.fromkeys(self._group(candidate) for candidate in wanted))
            groups = [group for group in groups if group not in self._untraceable][: min(limit, 2)]
            if not groups:
                return
            limit -= len(groups)
            before = {
                estimate.candidate: estimate.memory.device_bytes for estimate in best if estimate.memory is not None
            }
            self._trace(groups)
            self._compare(before, groups)

    def ranked(self) -> list[Estimate]:
        """Return estimates of all candidates: those that fit first, the fastest first; unknown ones last."""
        return sorted(map(self.estimate, self.candidates), key=_rank)

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the estimate of a candidate in its normal form; of the problem's space, or near it."""
        load = self._load(candidate)
        group = group_of(candidate, load.kind)
        key = (group, load)
        if key not in self._forecasts:
            self._forecasts[key] = self._estimate(group, load)
        found = self._forecasts[key]
        if found is None:
            reason = self._untraceable.get(group, "a technique of it was never traced")
            return Estimate(candidate, Origin.UNKNOWN, reason=reason)
        memory, origin = found
        rate = load.tokens * load.micro_batches / memory.step_seconds if memory.step_seconds else None
        spare_bytes = self._target.budget_bytes - memory.device_bytes
        return Estimate(candidate, origin, memory, rate, spare_bytes)

    def _load(self, candidate: Candidate) -> Load:
        if candidate not in self._loads:
            self._loads[candidate] = load_of(candidate, self._problem.setting)
        return self._loads[candidate]

    def _group(self, candidate: Candidate) -> Group:
        return group_of(candidate, self._load(candidate).kind)

    def _trace(self, groups: Sequence[Group]) -> None:
        points = {group: list(self._points(group)) for group in groups}
        requests = {
            (group, point): trace_request(
                self._plan(group), group.kind, point[1], point[0], self._problem.setting, self._target.gpu
            )
            for group in groups
            for point in points[group]
        }
        found = dict(zip(requests, self._traces.get(list(requests.values())), strict=True))
        for group in groups:
            replies = {point: found[group, point] for point in points[group]}
            failed = next((reply for reply in replies.values() if isinstance(reply, Untraceable)), None)
            if failed is not None:
                self._untraceable[group] = failed.reason
                continue
            good = {point: reply for point, reply in replies.items() if not isinstance(reply, Untraceable)}
            self._fits[group] = Fit(self._anchors[group.kind].basis, good)
        self._composition = Composition(tuple(self._fits))
        self._forecasts.clear()

    def _points(self, group: Group) -> Iterator[Point]:
        return itertools.product(depths_of(self._plan(group), self._layer_kinds), self._anchors[group.kind].shapes)

    def _plan(self, group: Group) -> TrainingPlan:
        return self._problem.trainer.plan(self._groups[group], self._problem.setting)

    def _compare(self, before: Mapping[Candidate, int], groups: Sequence[Group]) -> None:
        for candidate, composed_bytes in before.items():
            traced = self.estimate(candidate).memory
            if self._group(candidate) in groups and self._group(candidate) in self._fits and traced is not None:
                self._differences.append(abs(composed_bytes / traced.device_bytes - 1))

    def _estimate(self, group: Group, load: Load) -> tuple[MemoryEstimate, Origin] | None:
        if group in self._fits:
            return memory_estimate(
                *self._forecast(group, load), load.micro_batches, self._target.gpu, TRACED_ERROR
            ), Origin.TRACED
        terms = self._composition.terms(group) if group not in self._untraceable else None
        if terms is None:
            return None
        forecasts = [(self._forecast(term.group, load), term.weight) for term in terms]
        worst = mixed([(pair[0], weight) for pair, weight in forecasts])
        typical = mixed([(pair[1], weight) for pair, weight in forecasts])
        memory = memory_estimate(worst, typical, load.micro_batches, self._target.gpu, self.composed_error)
        return memory, Origin.COMPOSED

    def _forecast(self, group: Group, load: Load) -> tuple[Forecast, Forecast]:
        """Return the forecasts of the largest and of a typical micro-batch for a group that was traced."""
        key = (group, load)
        if key not in self._traced_forecasts:
            self._traced_forecasts[key] = self._follow(self._fits[group], load)
        return self._traced_forecasts[key]

    def _follow(self, fit: Fit, load: Load) -> tuple[Forecast, Forecast]:
        layers = len(self._layer_kinds)
        worst = fit.forecast(layers, load.worst, load.micro_batches)
        same = load.typical == load.worst
        return worst, worst if same else fit.forecast(layers, load.typical, load.micro_batches)


def depths_of(plan: TrainingPlan, layer_kinds: Sequence[str]) -> tuple[int, ...]:
    """Return the depths at which a plan is traced; a technique may repeat over several layers."""
    kwargs = plan.args.get("gradient_checkpointing_kwargs")
    every = kwargs.get("every_n_layers") if isinstance(kwargs, Mapping) else None
    return traced_depths(layer_kinds, every if isinstance(every, int) else 1)


def _rank(estimate: Estimate) -> tuple[bool, bool, float, int]:
    memory = estimate.memory
    return (
        memory is None,
        not estimate.fits,
        -(estimate.tokens_per_second or 0.0),
        memory.device_bytes if memory is not None else 0,
    )
