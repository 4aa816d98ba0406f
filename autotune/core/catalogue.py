"""The catalogue of techniques as values: the choices of each knob, and whether this machine supports them."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.candidate import Choice


@dataclass(frozen=True)
class CatalogueOption:
    """One choice of a knob.

    Attributes:
        summary: its effect, in a few words.
        effect: ``exact`` or ``changes-training``.
        available: whether this machine supports it.
        reason: why not, in words; empty if it does.
    """

    choice: Choice
    summary: str
    effect: str
    available: bool
    reason: str = ""


@dataclass(frozen=True)
class CatalogueRow:
    """One knob.

    Attributes:
        knob: its name, spelled the same everywhere.
        summary: its trade-off, in one sentence.
        needs: its requirements, in words; empty without any.
        changes: how its training-changing choices change training, in words; empty when it has none.
        writes: the plan entries that it owns, such as ``args.packing``.
        in_default_space: whether the trainer's shipped search space has it.
        default: TRL's default.
    """

    knob: str
    summary: str
    needs: str
    changes: str
    writes: tuple[str, ...]
    in_default_space: bool
    default: str
    options: tuple[CatalogueOption, ...]
