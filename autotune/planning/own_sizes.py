"""Keeps the traces of candidates at the sizes of their own micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate, Origin
from autotune.core.setting import Setting
from autotune.planning.additive.group import Group
from autotune.planning.cases import Case, Cases
from autotune.planning.single import PlanTracer, Sized, TracedPlan
from autotune.probing.tracing import Untraceable
from autotune.trainers.evaluation import whole_geometry
from autotune.trainers.problem import TrainerProblem


class OwnSizes:
    """The candidates of a problem that were traced at their own sizes.

    Args:
        tracer: returns the tracer of plans of a setting.
    """

    def __init__(self, problem: TrainerProblem, cases: Cases, tracer: Callable[[Setting], PlanTracer]) -> None:
        self._problem = problem
        self._cases = cases
        self._tracer = tracer
        self._found: dict[tuple[Group, Case], TracedPlan | Untraceable] = {}

    def asked(self, candidate: Candidate) -> bool:
        """Return whether a candidate was traced, or could not be."""
        return self._cases.key(candidate) in self._found

    def of(self, candidate: Candidate) -> TracedPlan | None:
        """Return a candidate as it was traced, or None."""
        found = self._found.get(self._cases.key(candidate))
        return found if isinstance(found, TracedPlan) else None

    def trace(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Group, str]]:
        """Trace candidates, all at once, and yield the technique combinations of those that cannot be, with why."""
        trainer, setting = self._problem.trainer, self._problem.setting
        sized = [Sized(trainer.plan(candidate, setting), self._cases.geometry(candidate)) for candidate in candidates]
        for candidate, own in zip(candidates, self._tracer(setting).traced(sized, timed=True), strict=True):
            key = group, _ = self._cases.key(candidate)
            self._found[key] = own
            if isinstance(own, Untraceable):
                yield group, own.reason

    def open(self, found: Iterable[Estimate], lost: Collection[Group]) -> Iterator[Estimate]:
        """Yield the estimates that further traces may improve, once for each candidate or combination to trace.

        Args:
            lost: technique combinations that cannot be traced.
        """
        seen = set[object]()
        for estimate in found:
            key = group, _ = self._cases.key(estimate.candidate)
            asked = key if estimate.origin is Origin.EXTRAPOLATED else group
            if group not in lost and key not in self._found and asked not in seen:
                seen.add(asked)
                yield estimate

    def elsewhere(self, candidate: Candidate, setting: Setting) -> TracedPlan | Untraceable:
        """Return a candidate as it is traced with the rows of another setting."""
        plan = self._problem.trainer.plan(candidate, setting)
        sized = Sized(plan, whole_geometry(self._problem.trainer, plan, setting.workload))
        return self._tracer(setting).traced([sized], timed=True)[0]

    def traced(self) -> Iterator[tuple[Group, TracedPlan]]:
        """Yield what was traced, with its technique combination."""
        yield from ((group, own) for (group, _), own in self._found.items() if isinstance(own, TracedPlan))
