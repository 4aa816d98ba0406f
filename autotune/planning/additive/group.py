"""Groups candidates that share traces: they differ only in sizes or the allocator, on micro-batches of one layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from autotune.core.batch_geometry import Layout
from autotune.core.candidate import Candidate, Choice
from autotune.techniques.traits import allocator_knobs, size_knobs

LAYOUT = "layout"
"""Name of the layout as a factor beside the knobs."""


@dataclass(frozen=True)
class Group:
    """Candidates that share traces: one combination of levels, in the terms of design of experiments.

    Example: candidates that differ only in ``per_device_train_batch_size`` belong to one group as long as their
    micro-batches have the same layout.

    Attributes:
        choices: the choices of all knobs, except those that only set sizes or the allocator's behaviour.
        micro_batches: those of a step that are traced, where a step of one is not a part of a step of two; groups that
            differ in them have other sizes too, and one is not predicted from the other.
    """

    choices: Candidate
    layout: Layout
    micro_batches: int | None = None

    @cached_property
    def levels(self) -> Mapping[str, Choice]:
        """The level of each factor: the choice of each knob, and the layout."""
        return dict(self.choices) | {LAYOUT: self.layout.value}

    @cached_property
    def _hash(self) -> int:
        return hash((self.choices, self.layout, self.micro_batches))

    def __hash__(self) -> int:
        return self._hash

    def differences(self, other: Group) -> tuple[str, ...]:
        """Return the factors in which the groups differ."""
        mine, theirs = self.levels, other.levels
        return tuple([name for name in mine if mine[name] != theirs[name]])


def by_micro_batches(groups: Iterable[Group]) -> dict[int | None, list[Group]]:
    """Return groups by the micro-batches of a step that are traced; one kind is not predicted from another."""
    found: dict[int | None, list[Group]] = {}
    for group in groups:
        found.setdefault(group.micro_batches, []).append(group)
    return found


@lru_cache(maxsize=1 << 16)
def group_of(candidate: Candidate, layout: Layout, micro_batches: int | None = None) -> Group:
    """Return the group of a candidate on micro-batches of a layout; kept, since it is asked for at each ranking."""
    return Group(techniques_of(candidate), layout, micro_batches)


def techniques_of(candidate: Candidate) -> Candidate:
    """Return the choices of a candidate that set neither sizes nor the allocator's behaviour."""
    shared = size_knobs() | allocator_knobs()
    return Candidate({knob: choice for knob, choice in candidate.items() if knob not in shared})
