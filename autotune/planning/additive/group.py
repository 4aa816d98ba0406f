"""Which candidates share traces: those that differ in sizes alone, on micro-batches of the same layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autotune.core.batch_geometry import Layout
from autotune.core.candidate import Candidate, Choice
from autotune.techniques.traits import size_knobs

LAYOUT = "layout"
"""What the layout of rows is called where it is a factor like the choice of a knob."""


@dataclass(frozen=True)
class Group:
    """Candidates that share traces: one combination of levels, in the words of design of experiments.

    Attributes:
        choices: of all knobs that do not only choose sizes.
    """

    choices: Candidate
    layout: Layout

    @cached_property
    def levels(self) -> Mapping[str, Choice]:
        """The level of each factor: what tells groups apart, the layout as if it were a knob."""
        return dict(self.choices) | {LAYOUT: self.layout.value}

    @cached_property
    def _hash(self) -> int:
        return hash((self.choices, self.layout))

    def __hash__(self) -> int:
        return self._hash

    def differences(self, other: Group) -> tuple[str, ...]:
        """Return the factors in which the groups differ."""
        mine, theirs = self.levels, other.levels
        return tuple([name for name in mine if mine[name] != theirs[name]])


def group_of(candidate: Candidate, layout: Layout) -> Group:
    """Return the group of a candidate on micro-batches of a layout."""
    sizes = size_knobs()
    return Group(Candidate({knob: choice for knob, choice in candidate.items() if knob not in sizes}), layout)
