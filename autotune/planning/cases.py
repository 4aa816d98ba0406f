"""Finds what the estimates of candidates follow from: technique combinations, micro-batches, uses of the allocator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autotune.core.batch_geometry import BatchGeometry
from autotune.core.candidate import Candidate, Choice
from autotune.core.plan import AllocatorUse
from autotune.planning.additive.group import Group, group_of
from autotune.techniques.sharding import DDP
from autotune.techniques.traits import MOST_TRACED, allocator_knobs, geometry_knobs
from autotune.trainers.evaluation import whole_geometry
from autotune.trainers.problem import TrainerProblem

Case = tuple[BatchGeometry, AllocatorUse]
"""What an estimate of a technique combination follows from: micro-batches, of which one shape is the worst, and how the
allocator is used."""


@dataclass(frozen=True, eq=False)
class CaseList:
    """Cases that are estimated at once; many technique combinations have the same object."""

    cases: tuple[Case, ...]


class Cases:
    """The cases of candidates.

    Attributes:
        geometries: by candidate.
        groups: the technique combinations, with a candidate of each.
        evaluated: by combination, those whose traces only serve its evaluation, which has another layout than its
            training; with a candidate of each.
        uses: the ways in which candidates use the caching allocator.
    """

    def __init__(self, problem: TrainerProblem, candidates: Iterable[Candidate]) -> None:
        self._problem = problem
        self._by_sizes: dict[tuple[Choice, ...], BatchGeometry] = {}
        self._geometry_knobs = geometry_knobs()
        self._uses: dict[tuple[Choice, ...], AllocatorUse] = {}
        self._allocator_knobs = allocator_knobs()
        self.geometries: dict[Candidate, BatchGeometry] = {}
        # A ranking looks all candidates up.
        self._keys: dict[Candidate, tuple[Group, Case]] = {}
        self.groups: dict[Group, Candidate] = {}
        self.evaluated: dict[Group, dict[Group, Candidate]] = {}
        self._by_steps: dict[int | None, set[BatchGeometry]] = {}
        by_group: dict[Group, dict[Case, None]] = {}
        for candidate in candidates:
            group, geometry, use = self.admit(candidate), self.geometry(candidate), self.use(candidate)
            by_group.setdefault(group, {}).update(dict.fromkeys((each, use) for each in alternatives(geometry)))
        self.uses = tuple(dict.fromkeys(self._uses.values()))
        lists: dict[tuple[Case, ...], CaseList] = {}
        self._of = {group: lists.setdefault(cases, CaseList(cases)) for group, cases in _tuples(by_group)}

    def admit(self, candidate: Candidate) -> Group:
        """Return the technique combination of a candidate, which can be traced from now on."""
        geometry = self.geometry(candidate)
        group = self.group(candidate)
        self.groups.setdefault(group, candidate)
        self._by_steps.setdefault(group.micro_batches, set()).add(geometry)
        if geometry.evaluation is not None and geometry.evaluation.layout is not geometry.layout:
            beside = replace(group, layout=geometry.evaluation.layout)
            self.evaluated.setdefault(group, {})[beside] = candidate
        return group

    def of(self, group: Group, case: Case) -> CaseList:
        """Return the cases of a technique combination, with the given one among them."""
        known = self._of.get(group)
        return known if known is not None and case in known.cases else CaseList((case,))

    def geometry(self, candidate: Candidate) -> BatchGeometry:
        """Return the micro-batches that a candidate makes of the problem's rows."""
        if candidate not in self.geometries:
            # Only the knobs that set sizes decide the geometry, so it is computed once for each of their combinations.
            sizes = tuple([choice for knob, choice in candidate.items() if knob in self._geometry_knobs])
            if sizes not in self._by_sizes:
                trainer, setting = self._problem.trainer, self._problem.setting
                self._by_sizes[sizes] = whole_geometry(trainer, trainer.plan(candidate, setting), setting.workload)
            self.geometries[candidate] = self._by_sizes[sizes]
        return self.geometries[candidate]

    def geometries_of(self, micro_batches: int | None) -> set[BatchGeometry]:
        """Return the geometries of the candidates whose groups have so many micro-batches of a step traced."""
        return set(self._by_steps[micro_batches])

    def use(self, candidate: Candidate) -> AllocatorUse:
        """Return how a candidate uses the caching allocator."""
        return self.key(candidate)[1][1]

    def key(self, candidate: Candidate) -> tuple[Group, Case]:
        """Return what a candidate's figures follow from; candidates that have it in common have the same figures."""
        known = self._keys.get(candidate)
        if known is None:
            case = self.geometry(candidate), self._use(candidate)
            known = self._keys[candidate] = self._group(candidate), case
        return known

    def _use(self, candidate: Candidate) -> AllocatorUse:
        chosen = tuple([choice for knob, choice in candidate.items() if knob in self._allocator_knobs])
        if chosen not in self._uses:
            self._uses[chosen] = self._problem.trainer.plan(candidate, self._problem.setting).allocator
        return self._uses[chosen]

    def group(self, candidate: Candidate) -> Group:
        """Return the technique combination of a candidate."""
        return self.key(candidate)[0]

    def _group(self, candidate: Candidate) -> Group:
        geometry = self.geometry(candidate)
        alone = self._problem.setting.machine.hardware.processes == 1 and candidate.get("sharding", DDP) == DDP
        return group_of(candidate, geometry.layout, None if alone else min(MOST_TRACED, geometry.micro_batches))


def alternatives(geometry: BatchGeometry) -> tuple[BatchGeometry, ...]:
    """Return a geometry once for each of the shapes that may need the most memory, with that as the worst."""
    if not geometry.rivals:
        return (geometry,)
    return tuple(replace(geometry, worst=shape, rivals=()) for shape in geometry.shapes)


def _tuples(by_group: Mapping[Group, Iterable[Case]]) -> Iterable[tuple[Group, tuple[Case, ...]]]:
    return ((group, tuple(cases)) for group, cases in by_group.items())
