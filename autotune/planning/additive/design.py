"""Which ways to train to trace, so that all others follow from them as well as can be with so few."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from autotune.core.batch_geometry import Layout
from autotune.core.candidate import Choice
from autotune.planning.additive.group import Group
from autotune.planning.extrapolation.fit import Fit

Fact = tuple[str, Choice]
"""A knob and its choice; or how rows lie, as if it were a knob."""
# Share of the memory of a micro-batch that counts as no difference.
_NO_DIFFERENCE = 0.002


class Design:
    """Chooses groups to trace.

    Args:
        groups: all that there are.
        base: what others are compared with.
        recipes: groups of candidates that are recommended somewhere.
    """

    def __init__(self, groups: Collection[Group], base: Group, recipes: Sequence[Group]) -> None:
        self._groups = groups
        self._recipes = recipes
        kinds = dict.fromkeys([base.layout, *sorted({group.layout for group in groups})])
        every = [base, *groups]
        self._centres = {kind: _nearest(base, [group for group in every if group.layout is kind]) for kind in kinds}

    def wanted(self, fits: Mapping[Group, Fit], need: Callable[[Group], int], limit: int) -> Iterator[list[Group]]:
        """Yield groups that are to be traced together, the most telling ones first; some may have been traced.

        First what shows each choice once. Then, for each kind of rows, those choices that do not change the memory of
        a micro-batch by the same at every size; last, pairs of these, since such choices may not add up, from the
        largest effects on.

        Args:
            fits: those that were traced, which change while this goes on.
            need: bytes of a traced group's largest micro-batch.
            limit: how many there may be at the most, except that each choice is shown.
        """
        if len(self._groups) <= limit:
            yield list(self._groups)
            return
        base = next(iter(self._centres.values()))
        yield list(dict.fromkeys([base, *self._each_once(base), *self._centres.values(), *self._recipes]))
        effects = self.effects(fits, need)
        telling = {fact for found in effects.values() for fact in found}
        others = [centre for centre in self._centres.values() if centre is not base]
        yield [
            group
            for centre in others
            for group in _singles(centre, self._groups)
            if all((fact, group.levels[fact]) in telling for fact in group.differences(centre))
        ][: max(0, limit - len(fits))]
        effects = self.effects(fits, need)
        found = chain.from_iterable(_pairs(self._centres[kind], effects[kind], self._groups) for kind in effects)
        ranked = [group for _, group in sorted(found, key=lambda pair: -pair[0]) if group not in fits]
        yield ranked[: max(0, limit - len(fits))]

    def effects(self, fits: Mapping[Group, Fit], need: Callable[[Group], int]) -> dict[Layout, dict[Fact, float]]:
        """Return what single choices change in what the largest micro-batches need, where sizes tell how much."""
        found: dict[Layout, dict[Fact, float]] = {}
        for kind, centre in self._centres.items():
            if centre in fits:
                found[kind] = {
                    (fact, group.levels[fact]): abs(need(group) - need(centre))
                    for group in _singles(centre, fits)
                    for fact in group.differences(centre)
                    if fits[group].differs_by_sizes(fits[centre], _NO_DIFFERENCE)
                }
        return found

    def _each_once(self, base: Group) -> Iterator[Group]:
        """Yield for each choice a group that has it, and one that differs in nothing else: the base where possible."""
        having: dict[Fact, list[Group]] = {}
        for group in self._groups:
            if group.layout is base.layout:
                for fact in group.levels.items():
                    having.setdefault(fact, []).append(group)
        for (knob, choice), groups in having.items():
            nearest = _nearest(base, groups)
            if choice != base.levels[knob]:
                yield nearest
            partners = [group for group in self._groups if group.differences(nearest) == (knob,)]
            if len(nearest.differences(base)) > 1 and partners:
                yield _nearest(base, partners)


def _nearest(base: Group, groups: Iterable[Group]) -> Group:
    return min(groups, key=lambda group: len(group.differences(base)))


def _singles(base: Group, groups: Iterable[Group]) -> list[Group]:
    """Return the groups of the same kind of rows that differ by a single choice."""
    return [group for group in groups if group.layout is base.layout and len(group.differences(base)) == 1]


def _pairs(base: Group, effects: Mapping[Fact, float], groups: Iterable[Group]) -> Iterator[tuple[float, Group]]:
    """Yield the groups that differ by two choices with effects, each with the product of these."""
    for group in groups:
        if group.layout is base.layout:
            facts = [(fact, group.levels[fact]) for fact in group.differences(base)]
            if len(facts) == 2 and all(fact in effects for fact in facts):
                yield effects[facts[0]] * effects[facts[1]], group
