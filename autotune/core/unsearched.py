"""The choices of a search space that are not searched: what cannot be done here, and what the user could allow."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.candidate import Choice


@dataclass(frozen=True)
class LeftOut:
    """A choice of the search space that was not searched, and why."""

    knob: str
    choice: Choice
    reason: str


@dataclass(frozen=True)
class Unlockable:
    """Choices that ``--allow KNOB`` would add to the search. None of them was measured.

    Attributes:
        choices: the choices that would be searched.
        changes: how they change training, in words.
    """

    knob: str
    choices: tuple[Choice, ...]
    changes: str
