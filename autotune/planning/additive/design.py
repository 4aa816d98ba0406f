"""Selects the technique combinations to trace; the others are predicted by an additive model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from autotune.core.batch_geometry import Layout
from autotune.core.candidate import Choice
from autotune.planning.additive.group import Group
from autotune.planning.extrapolation.fit import Fit

Level = tuple[str, Choice]
"""A factor and its level: a knob and its choice, or :data:`~autotune.planning.additive.group.LAYOUT` and a layout."""
# Differences up to this share of a micro-batch's memory are treated as none.
_NO_DIFFERENCE = 0.002


class Design:
    """Selects the groups to trace, within a limit, so that the additive model can predict the rest.

    Example: two knobs with levels ``off`` and ``on`` and the base ``(off, off)``. The first groups to trace are
    ``(off, off)``, ``(on, off)`` and ``(off, on)``, which show each effect once. ``(on, on)`` is traced later, to show
    the interaction, if both effects depend on the size of the micro-batch and the limit allows it.

    Args:
        groups: every group of the search space that has as many micro-batches of a step traced as the base.
        base: the group from which effects are counted: the baseline's, or the one most like it.
        recipes: the groups of documented candidates.
    """

    def __init__(self, groups: Collection[Group], base: Group, recipes: Sequence[Group]) -> None:
        self._groups = groups
        self._recipes = recipes
        self._steps = base.micro_batches
        layouts = dict.fromkeys([base.layout, *sorted({group.layout for group in groups})])
        every = [base, *groups]
        self._centres = {
            layout: nearest(base, [group for group in every if group.layout is layout]) for layout in layouts
        }

    def wanted(self, fits: Mapping[Group, Fit], need: Callable[[Group], int], limit: int) -> Iterator[list[Group]]:
        """Yield batches of groups to trace, the most informative first; some groups may have been traced already.

        The first batch begins with the base and the recipes, and shows each level once, near the base. The second
        repeats, on each other layout, the levels whose effect on a micro-batch's memory depends on its size. The last
        holds pairs of such levels, which may interact, in descending order of the product of their effects.

        Args:
            fits: the traced groups. The caller adds to it between batches.
            need: returns the bytes of a traced group's largest micro-batch.
            limit: the most groups of this design to trace in all; the first batch may exceed it.
        """
        base = next(iter(self._centres.values()))
        if len(self._groups) <= limit:
            yield list(dict.fromkeys([base, *self._recipes, *self._groups]))
            return
        yield list(dict.fromkeys([base, *self._recipes, *self._each_once(base), *self._centres.values()]))
        effects = self.effects(fits, need)
        interacting = {level for found in effects.values() for level in found}
        others = [centre for centre in self._centres.values() if centre is not base]
        yield [
            group
            for centre in others
            for group in _singles(centre, self._groups)
            if all((factor, group.levels[factor]) in interacting for factor in group.differences(centre))
        ][: max(0, limit - len(self._own(fits)))]
        effects = self.effects(fits, need)
        found = chain.from_iterable(_pairs(self._centres[layout], effects[layout], self._groups) for layout in effects)
        ranked = [group for _, group in sorted(found, key=lambda pair: -pair[0]) if group not in fits]
        yield ranked[: max(0, limit - len(self._own(fits)))]

    def effects(self, fits: Mapping[Group, Fit], need: Callable[[Group], int]) -> dict[Layout, dict[Level, float]]:
        """Return the main effects of levels, in bytes of the largest micro-batch, by layout.

        Only levels whose effect depends on the size of the micro-batch are included.
        """
        fits = self._own(fits)
        found: dict[Layout, dict[Level, float]] = {}
        for layout, centre in self._centres.items():
            if centre in fits:
                found[layout] = {
                    (factor, group.levels[factor]): abs(need(group) - need(centre))
                    for group in _singles(centre, fits)
                    for factor in group.differences(centre)
                    if fits[group].differs_by_sizes(fits[centre], _NO_DIFFERENCE)
                }
        return found

    def _own(self, fits: Mapping[Group, Fit]) -> Mapping[Group, Fit]:
        return {group: fit for group, fit in fits.items() if group.micro_batches == self._steps}

    def _each_once(self, base: Group) -> Iterator[Group]:
        """Yield, for each level, a group that has it and one that differs in that factor only, the base if possible."""
        having: dict[Level, list[Group]] = {}
        for group in self._groups:
            if group.layout is base.layout:
                for level in group.levels.items():
                    having.setdefault(level, []).append(group)
        for (knob, choice), groups in having.items():
            near = nearest(base, groups)
            if choice != base.levels[knob]:
                yield near
            partners = [group for group in self._groups if group.differences(near) == (knob,)]
            if len(near.differences(base)) > 1 and partners:
                yield nearest(base, partners)


def nearest(base: Group, groups: Iterable[Group]) -> Group:
    """Return the first of the groups that differ from the base in the fewest factors."""
    return min(groups, key=lambda group: len(group.differences(base)))


def _singles(base: Group, groups: Iterable[Group]) -> list[Group]:
    """Return the groups of the base's layout that differ from it in one factor."""
    return [group for group in groups if group.layout is base.layout and len(group.differences(base)) == 1]


def _pairs(base: Group, effects: Mapping[Level, float], groups: Iterable[Group]) -> Iterator[tuple[float, Group]]:
    """Yield the groups that differ from the base in two factors with known effects, each with the product of these."""
    for group in groups:
        if group.layout is base.layout:
            levels = [(factor, group.levels[factor]) for factor in group.differences(base)]
            if len(levels) == 2 and all(level in effects for level in levels):
                yield effects[levels[0]] * effects[levels[1]], group
