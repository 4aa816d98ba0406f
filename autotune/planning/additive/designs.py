"""Shares traces out among technique combinations of which one kind is not predicted from another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from autotune.planning.additive.design import Design, Level, nearest
from autotune.planning.additive.group import Group, by_micro_batches
from autotune.planning.extrapolation.fit import Fit


class Designs:
    """One :class:`Design` for the groups that have the same micro-batches of a step traced.

    Args:
        groups: every group of the search space.
        base: the group of the baseline.
        recipes: the groups of documented candidates.
    """

    def __init__(self, groups: Iterable[Group], base: Group, recipes: Sequence[Group]) -> None:
        alike = {base.micro_batches: [], **by_micro_batches(groups)}
        self._designs = {
            steps: Design(
                found,
                base if steps == base.micro_batches else nearest(base, found),
                [group for group in recipes if group.micro_batches == steps],
            )
            for steps, found in alike.items()
        }

    def wanted(self, fits: Mapping[Group, Fit], need: Callable[[Group], int], limit: int) -> Iterator[list[Group]]:
        """Yield batches of groups to trace, those of the baseline's kind first; see :meth:`Design.wanted`.

        Args:
            limit: the most groups to trace in all; each kind gets an equal share, and what those before it left.
        """
        kinds = len(self._designs)
        for number, (steps, design) in enumerate(self._designs.items()):
            others = sum(group.micro_batches != steps for group in fits)
            yield from design.wanted(fits, need, max(0, limit - others) // (kinds - number))

    def interacting(self, fits: Mapping[Group, Fit], need: Callable[[Group], int]) -> set[Level]:
        """Return the levels whose effect on a micro-batch's memory depends on its size, for all that is known."""
        return {
            level
            for design in self._designs.values()
            for found in design.effects(fits, need).values()
            for level in found
        }
