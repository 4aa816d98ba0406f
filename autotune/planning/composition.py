"""Forecasts for combinations of techniques that were not traced, from those that were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.planning.groups import Group


@dataclass(frozen=True)
class Term:
    """A traced group whose figures count with a weight."""

    group: Group
    weight: float


class Composition:
    """Adds up what each technique changed where it was traced, as near as can be to where it is wanted."""

    def __init__(self, traced: Sequence[Group]) -> None:
        self._traced = list(traced)
        # By the fact in which two traced groups alone differ.
        self._pairs: dict[str, list[tuple[Group, Group]]] = {}
        for first in self._traced:
            for second in self._traced:
                differences = first.differences(second)
                if len(differences) == 1:
                    self._pairs.setdefault(differences[0], []).append((first, second))

    def terms(self, group: Group) -> tuple[Term, ...] | None:
        """Return whose figures add up to a group's, or None where one of its techniques was never traced."""
        if not self._traced:
            return None
        nearest = min(self._traced, key=lambda other: len(group.differences(other)))
        weights: dict[Group, float] = {nearest: 1.0}
        for fact in group.differences(nearest):
            pairs = list(self._likest(fact, group, nearest))
            if not pairs:
                return None
            for changed, unchanged in pairs:
                weights[changed] = weights.get(changed, 0.0) + 1 / len(pairs)
                weights[unchanged] = weights.get(unchanged, 0.0) - 1 / len(pairs)
        return tuple(Term(other, weight) for other, weight in weights.items() if weight)

    def _likest(self, fact: str, group: Group, nearest: Group) -> Iterator[tuple[Group, Group]]:
        """Yield the pairs that show what a fact changes and are most like the group."""
        wanted = (group.facts[fact], nearest.facts[fact])
        shown = [
            (len(group.differences(changed)), (changed, unchanged))
            for changed, unchanged in self._pairs.get(fact, ())
            if (changed.facts[fact], unchanged.facts[fact]) == wanted
        ]
        least = min((distance for distance, _ in shown), default=0)
        yield from (pair for distance, pair in shown if distance == least)


def design(base: Group, wanted: Mapping[Group, object], first: Sequence[Group], limit: int) -> list[Group]:
    """Return the groups to trace before any other, so that all that are wanted can be composed.

    Args:
        base: differs from others by single facts.
        wanted: every group that there is.
        first: groups of candidates that are recommended somewhere, in their order.
        limit: how many at the most; all that are wanted where they are no more.
    """
    if len(wanted) <= limit:
        return list(wanted)
    singles = [group for group in wanted if len(group.differences(base)) <= 1]
    singles.sort(key=lambda group: len(group.differences(base)))
    known = [group for group in first if group in wanted]
    return list(dict.fromkeys([*singles, *known]))[: max(limit, len(singles))]
