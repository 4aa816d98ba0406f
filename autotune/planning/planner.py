"""Chooses which technique combinations to trace, and ranks the candidates by what follows from the traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat

from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate, Origin, distinct, need, news, rank, undecided
from autotune.core.setting import Setting
from autotune.planning.additive.designs import Designs
from autotune.planning.additive.group import Group
from autotune.planning.candidate_estimates import CandidateEstimates
from autotune.planning.cases import Cases
from autotune.planning.estimates import Estimates
from autotune.planning.own_sizes import OwnSizes
from autotune.planning.points import GroupPoints
from autotune.planning.single import PlanTracer
from autotune.planning.target import Accelerator
from autotune.planning.tracing.store import Traces
from autotune.probing.tracing import Untraceable
from autotune.trainers.problem import TrainerProblem

EXPLORED = 36
"""Technique combinations that are traced before the first ranking. A trace takes about 0.3 s, or 1 s with
several processes, and a combination needs two to seven."""
# Most further candidates that are traced to find one that fits, and before the ranking is computed again.
_UNDECIDED, _UNDECIDED_AT_ONCE = 48, 8
# Most candidates that are traced to find the one that needs the least.
_LEAST = 12
# Technique combinations that are usually traced after the first ranking: 3 to 10 for the 8B shape.
_USUALLY_REFINED = 8


class Planner:
    """Estimates candidates of one problem on one target.

    First :meth:`explore`, then :meth:`refine`, then :meth:`ranked`; :meth:`trace` and :meth:`estimate` may be called at
    any time. An estimate is traced if the candidate was traced at its own sizes, extrapolated if its technique
    combination was traced at others, composed by the additive model if its levels were traced in other combinations,
    and unknown otherwise.

    Attributes:
        candidates: the legal candidates that are ranked; :meth:`add` adds to them.
        to_come: about how many traces are needed after those that are being run.
        cut_short: whether :meth:`explore` was ended before it had traced all that it selected.
        figures: the estimates of candidates from what was traced so far.
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
        self._estimates = Estimates(cases, len(layer_kinds), target.gpu, target.process_bytes)
        self._points = GroupPoints(problem, cases, layer_kinds, target.gpu or target.cpu)
        recipes = [cases.group(recipe) for recipe in problem.recipes if recipe in cases.geometries]
        self._designs = Designs(cases.groups, cases.group(problem.baseline), recipes)
        self._own = own = OwnSizes(problem, cases, self._tracer_in)
        known = self._estimates, own, self._points
        self.figures = CandidateEstimates(problem, target, traces, layer_kinds, cases, *known)

    @property
    def misaligned(self) -> int:
        """Number of technique combinations whose traces could not be aligned moment by moment."""
        alone = {group for group, own in self._own.traced() if not own.aligned}
        return len(alone | {group for group, fit in self._estimates.fits.items() if not fit.aligned})

    @property
    def assumptions(self) -> Sequence[str]:
        """What traces assumed where a step depends on the values of real data, in sentences."""
        alone = (own.fits.values() for _, own in self._own.traced())
        return sorted({assumed for fit in chain(self._estimates.fits.values(), *alone) for assumed in fit.assumptions})

    @property
    def untraceable(self) -> dict[Group, str]:
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
        if len(self.candidates) <= min(limit, len(self._cases.groups)):
            # None shares traces with another one.
            left: Sequence[Candidate] = self.candidates
            while left and goes_on():
                size = next(sizes)
                self.to_come = len(left[size:])
                self.trace(left[:size])
                left = left[size:]
            self.cut_short = bool(left)
            return
        total = min(limit, len(self._cases.groups))
        for groups in self._designs.wanted(self._estimates.fits, self._largest_need, limit):
            wanted = groups
            while wanted:
                if not goes_on():
                    self.cut_short = True
                    return
                size = next(sizes)
                portion, wanted = wanted[:size], wanted[size:]
                done = len(self._estimates.fits) + len(self.untraceable) + len(portion)
                self._expect(max(len(wanted), total - done) + _USUALLY_REFINED)
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
        wide._trace(map(wide._cases.admit, further))
        wide.trace(candidate for candidate in self.candidates if self._own.asked(candidate))
        return wide

    def trace(self, candidates: Iterable[Candidate]) -> None:
        """Trace candidates in their normal form at their own sizes, as far as they were not traced yet."""
        different = {self._cases.key(candidate): candidate for candidate in candidates}
        asked = [candidate for candidate in different.values() if not self._own.asked(candidate)]
        for candidate in asked:
            self._cases.admit(candidate)
        if asked:
            with self._compared(asked):
                self._trace_alone(asked)

    def add(self, candidates: Iterable[Candidate]) -> None:
        """Add legal candidates in their normal form to those that are ranked, and trace them and their combinations."""
        further = tuple(candidates)
        self.candidates = tuple(dict.fromkeys((*self.candidates, *further)))
        self._trace(map(self._cases.admit, further))
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
        """Trace the candidates of an answer at their own sizes, until none is left or the limit is reached.

        What is predicted to be as one that was traced is left out. Those whose estimates are composed have their
        technique combination traced first: others that share it may be in the way.

        Args:
            wanted: returns, from a ranking, the estimates that the answer consists of, the most important first.
            limit: most traces of a candidate or a combination, unless none of those that fit was traced: then a few of
                the smallest are too.
            goes_on: returns whether to continue.
        """
        count = 0
        while True:
            ranked = news(self.ranked())
            asked = list(self._open(wanted(ranked)))[: max(0, limit - count)]
            if not asked and undecided(ranked) and count < limit + _UNDECIDED:
                asked = list(self._open(sorted(ranked, key=need)))[:_UNDECIDED_AT_ONCE]
            if not asked or not goes_on():
                return
            count += len(asked)
            self.to_come = 0
            with self._compared(found.candidate for found in asked):
                extrapolated = [found.candidate for found in asked if found.origin is Origin.EXTRAPOLATED]
                self._trace(self._cases.group(found.candidate) for found in asked)
                self._trace_alone(extrapolated)

    def _open(self, found: Iterable[Estimate]) -> Iterator[Estimate]:
        return self._own.open(found, self.untraceable.keys() - self._estimates.fits.keys())

    @contextmanager
    def _compared(self, candidates: Iterable[Candidate]) -> Iterator[None]:
        """Record by how much the estimates of candidates change in this context."""
        kinds = [(candidate, self._estimates.kind(self._cases.group(candidate))) for candidate in candidates]
        before = [self.estimate(candidate) for candidate, _ in kinds]
        yield
        for (candidate, kind), estimated in zip(kinds, before, strict=True):
            traced = self.estimate(candidate)
            if estimated.memory and traced.memory and traced.origin is not estimated.origin:
                self._estimates.compare(kind, estimated.memory, traced.memory)

    def least(self) -> Estimate | None:
        """Return what needs the least memory, traced at its own sizes, or None if nothing is predicted."""
        for _ in range(_LEAST):
            best = min(self.ranked(), key=need, default=None)
            if best is None or best.memory is None or self._own.asked(best.candidate):
                return best if best is not None and best.memory is not None else None
            self.trace([best.candidate])
        return min((found for found in self.ranked() if found.origin is Origin.TRACED), key=need, default=None)

    def _expect(self, combinations: int) -> None:
        known = len(self._estimates.fits)
        each = self._traces.count / known if known else len(self._points.of(self._cases.group(self._problem.baseline)))
        self.to_come = round(combinations * each)

    def traced(self, count: int) -> tuple[Estimate, ...]:
        """Return the best of the candidates that were traced at their own sizes so far."""
        alone = [candidate for candidate in self.candidates if self._own.asked(candidate)]
        return distinct((found for found in sorted(map(self.estimate, alone), key=rank) if found.memory), count)

    def ranked(self) -> list[Estimate]:
        """Return estimates of all candidates.

        Candidates that fit come first, the fastest first; then those that do not fit, the least memory first; then
        those without an estimate.
        """
        return sorted(map(self.estimate, self.candidates), key=rank)

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the estimate of a candidate in its normal form, which need not be in the problem's space."""
        return self.figures.estimate(candidate)

    def traced_estimate(self, candidate: Candidate, setting: Setting | None = None) -> Estimate:
        """Return the estimate of any candidate, of the space or not, from traces at its own sizes.

        Args:
            setting: the problem's, or the same with a part of its rows.
        """
        if setting is None or setting is self._problem.setting:
            self.trace([candidate])
            return self.estimate(candidate)
        return self.figures.elsewhere(candidate, setting)

    def _tracer_in(self, setting: Setting) -> PlanTracer:
        target, uses = self._target, self._cases.uses
        known = target.process_bytes, self._layer_kinds
        return PlanTracer(self._traces, setting, target.gpu, target.cpu, uses, *known)

    def _trace_alone(self, asked: Sequence[Candidate]) -> None:
        for group, reason in self._own.trace(asked):
            if group not in self._estimates.fits:
                self.untraceable.setdefault(group, reason)

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
