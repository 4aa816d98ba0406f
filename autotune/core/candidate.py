"""A candidate: one choice for every technique."""

from __future__ import annotations

import json
from collections.abc import ItemsView, Iterator, Mapping

Choice = str | int
"""A choice, with the same spelling on the command line, in the space file and in ``result.json``."""


class Candidate(Mapping[str, Choice]):
    """An immutable, hashable mapping from knob to choice, spelled as in ``--fix`` and in the space file."""

    __slots__ = ("_choices", "_hash")

    def __init__(self, choices: Mapping[str, Choice]) -> None:
        self._choices = dict(choices)
        self._hash = hash(frozenset(self._choices.items()))

    def __getitem__(self, knob: str) -> Choice:
        return self._choices[knob]

    def __iter__(self) -> Iterator[str]:
        return iter(self._choices)

    def __len__(self) -> int:
        return len(self._choices)

    # Mapping's own versions of the following methods are too slow for tens of thousands of candidates.
    def items(self) -> ItemsView[str, Choice]:
        """Return the knobs with their choices."""
        return self._choices.items()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Candidate):
            return self._hash == other._hash and self._choices == other._choices
        return super().__eq__(other)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Candidate({json.dumps(self._choices)})"

    def but(self, **changes: Choice) -> Candidate:
        """Return this candidate with some choices replaced."""
        return Candidate({**self._choices, **changes})

    def differences(self, other: Candidate) -> dict[str, Choice]:
        """Return this candidate's choices for the knobs on which it differs from ``other``."""
        return {knob: choice for knob, choice in self.items() if other.get(knob) != choice}


class ReadTracking(Candidate):
    """A candidate that records which of its choices are read.

    Attributes:
        read: the knobs that were read.
    """

    __slots__ = ("read",)

    def __init__(self, candidate: Candidate) -> None:
        super().__init__(candidate)
        self.read: set[str] = set()

    def __getitem__(self, knob: str) -> Choice:
        self.read.add(knob)
        return super().__getitem__(knob)

    def __iter__(self) -> Iterator[str]:
        self.read.update(self._choices)
        return super().__iter__()

    def items(self) -> ItemsView[str, Choice]:
        """Return the knobs with their choices."""
        self.read.update(self._choices)
        return super().items()

    def but(self, **changes: Choice) -> Candidate:
        """Return this candidate with some choices replaced, as a plain candidate; all knobs count as read."""
        self.read.update(self._choices)
        return super().but(**changes)
