"""An additive model: forecasts for combinations of techniques that were not traced, from those that were."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autotune.core.candidate import Choice
from autotune.planning.additive.design import Level
from autotune.planning.additive.group import LAYOUT, Group


@dataclass(frozen=True)
class Term:
    """A traced group whose figures count with a weight."""

    group: Group
    weight: float


@dataclass(frozen=True)
class Sum:
    """Terms that add up to a group's figures.

    Attributes:
        unseen: how many choices, of those that may not add up, were never traced together with the others.
    """

    terms: tuple[Term, ...]
    unseen: int


class AdditiveModel:
    """Adds up what each technique changed where it was traced, as near as can be to where it is wanted.

    Args:
        traced: groups whose figures are known.
        interacting: levels that may interact with others, since what they change depends on sizes.
    """

    def __init__(self, traced: Sequence[Group], interacting: Collection[Level] = ()) -> None:
        self._traced = list(traced)
        self._interacting = interacting
        self._sums: dict[Group, Sum | None] = {}
        # By the factor in which two traced groups alone differ.
        self._pairs: dict[str, list[tuple[Group, Group]]] = {}
        for first in self._traced:
            for second in self._traced:
                differences = first.differences(second)
                if len(differences) == 1:
                    self._pairs.setdefault(differences[0], []).append((first, second))

    def sum(self, group: Group) -> Sum | None:
        """Return whose figures add up to a group's, or None where one of its techniques was never traced."""
        if group not in self._sums:
            self._sums[group] = self._sum(group) if self._traced else None
        return self._sums[group]

    def _sum(self, group: Group) -> Sum | None:
        nearest = min(self._traced, key=lambda other: self._distance(group, other))
        weights: dict[Group, float] = {nearest: 1.0}
        for factor in group.differences(nearest):
            steps = self._steps(factor, group, nearest)
            if not steps:
                return None
            for pairs in steps:
                for changed, unchanged in pairs:
                    weights[changed] = weights.get(changed, 0.0) + 1 / len(pairs)
                    weights[unchanged] = weights.get(unchanged, 0.0) - 1 / len(pairs)
        terms = tuple(Term(other, weight) for other, weight in weights.items() if weight)
        return Sum(terms, self._unseen(group, nearest))

    def _distance(self, group: Group, other: Group) -> tuple[int, int]:
        return self._unseen(group, other), len(group.differences(other))

    def _unseen(self, group: Group, other: Group) -> int:
        """Return in how many factors they differ that may not add up with others; how rows lie never does."""
        return sum(
            factor == LAYOUT or any((factor, of.levels[factor]) in self._interacting for of in (group, other))
            for factor in group.differences(other)
        )

    def _steps(self, factor: str, group: Group, nearest: Group) -> list[list[tuple[Group, Group]]]:
        """Return pairs that show what a factor changes, if need be in two steps, with a third choice between."""
        wanted, given = group.levels[factor], nearest.levels[factor]
        direct = self._likest(factor, (wanted, given), group)
        if direct:
            return [direct]
        for between in dict.fromkeys(changed.levels[factor] for changed, _ in self._pairs.get(factor, ())):
            steps = [self._likest(factor, ends, group) for ends in ((wanted, between), (between, given))]
            if all(steps):
                return steps
        return []

    def _likest(self, factor: str, choices: tuple[Choice, Choice], group: Group) -> list[tuple[Group, Group]]:
        """Return the pairs of two choices of a factor that are most like the group, its kind of rows first of all."""
        shown = [
            ((changed.layout is not group.layout, len(group.differences(changed))), (changed, unchanged))
            for changed, unchanged in self._pairs.get(factor, ())
            if (changed.levels[factor], unchanged.levels[factor]) == choices
        ]
        least = min((distance for distance, _ in shown), default=(False, 0))
        return [pair for distance, pair in shown if distance == least]
