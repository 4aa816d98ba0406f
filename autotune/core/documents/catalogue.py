"""The document of ``autotune techniques``: the choices of each knob, and which of them can be used."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.candidate import Choice


@dataclass(frozen=True)
class CatalogueOption:
    """One choice of a knob.

    Attributes:
        summary: its effect, in a few words.
        effect: ``exact`` or ``changes-training``.
        available: whether the trainer and this machine support it.
        reason: why not; empty if they do.
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
        needs: its requirements; empty without any.
        changes: how its choices change training; empty if all are exact.
        writes: the plan entries that it sets, such as ``args.packing``.
        in_default_space: whether autotune's own space file of the trainer has it.
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
