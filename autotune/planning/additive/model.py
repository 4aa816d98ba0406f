"""An additive model: predicts technique combinations that were not traced from those that were."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from autotune.core.candidate import Choice
from autotune.planning.additive.design import Level
from autotune.planning.additive.group import LAYOUT, Group


@dataclass(frozen=True)
class Term:
    """A traced group, and the weight of its figures in a sum."""

    group: Group
    weight: float


@dataclass(frozen=True)
class Sum:
    """The weighted traced groups whose figures add up to the prediction for another group.

    Attributes:
        unseen: number of factors that may interact and whose levels were not traced together with the others.
    """

    terms: tuple[Term, ...]
    unseen: int

    @cached_property
    def _hash(self) -> int:
        return hash((self.terms, self.unseen))

    def __hash__(self) -> int:
        # A ranking looks the sums of all candidates up.
        return self._hash


class AdditiveModel:
    """Predicts a group as the nearest traced group plus the effect of each factor in which the two differ.

    The effect of a factor is the difference of two traced groups that differ in it alone; of several such pairs, those
    most like the wanted group are averaged.

    Example: if ``(off, off)``, ``(on, off)`` and ``(off, on)`` were traced, then
    ``(on, on) = (on, off) + (off, on) - (off, off)``, with the weights 1, 1 and -1.

    Args:
        traced: groups whose figures are known.
        interacting: levels that may interact with others, because their effect depends on sizes.
    """

    def __init__(self, traced: Sequence[Group], interacting: Collection[Level] = ()) -> None:
        self._traced = list(traced)
        self._interacting = interacting
        self._sums: dict[Group, Sum | None] = {}
        # Pairs of traced groups that differ in a single factor, by that factor.
        self._pairs: dict[str, list[tuple[Group, Group]]] = {}
        for first in self._traced:
            for second in self._traced:
                differences = first.differences(second)
                if len(differences) == 1:
                    self._pairs.setdefault(differences[0], []).append((first, second))

    def sum(self, group: Group) -> Sum | None:
        """Return the terms that add up to a group, or None if no traced pair shows the effect of one of its levels."""
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
        """Return the number of factors that may interact and in which the groups differ; the layout always may."""
        return sum(
            factor == LAYOUT or any((factor, of.levels[factor]) in self._interacting for of in (group, other))
            for factor in group.differences(other)
        )

    def _steps(self, factor: str, group: Group, nearest: Group) -> list[list[tuple[Group, Group]]]:
        """Return pairs that show the effect of a factor, in one step or in two steps by way of a third level."""
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
        """Return the pairs with these two levels of a factor that are most like the group, first of all in layout."""
        shown = [
            ((changed.layout is not group.layout, len(group.differences(changed))), (changed, unchanged))
            for changed, unchanged in self._pairs.get(factor, ())
            if (changed.levels[factor], unchanged.levels[factor]) == choices
        ]
        least = min((distance for distance, _ in shown), default=(False, 0))
        return [pair for distance, pair in shown if distance == least]
