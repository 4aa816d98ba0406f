"""The choices of a search space that are not searched: impossible ones, and those that ``--allow`` would add."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.candidate import Choice


@dataclass(frozen=True)
class ExcludedChoice:
    """A choice of the search space that was not searched, and why."""

    knob: str
    choice: Choice
    reason: str


@dataclass(frozen=True)
class Unlockable:
    """Choices that ``--allow KNOB`` would add to the search. None of them was measured.

    Attributes:
        choices: the choices that it would add.
        changes: how they change training.
    """

    knob: str
    choices: tuple[Choice, ...]
    changes: str
