"""What a technique is: one knob, declared once, from which every spelling, table and plan entry derives."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from autotune.core.candidate import Candidate, Choice
from autotune.core.machine import Machine
from autotune.core.plan import TrainingPlan
from autotune.core.setting import Setting
from autotune.errors import InputError

OFF = "off"
ON = "on"


class Effect(StrEnum):
    """What a choice does to training. See law 3: the second kind is searched only when allowed by name."""

    EXACT = "exact"
    CHANGES_TRAINING = "changes-training"


@dataclass(frozen=True)
class Option:
    """One documented choice of a technique.

    Attributes:
        choice: its spelling; for a family of choices, one that stands for all, such as ``r16``.
        summary: what it does, in a few words.
        effect: what it does to training, all else at TRL's defaults.
    """

    choice: Choice
    summary: str
    effect: Effect = Effect.EXACT


class Technique(ABC):
    """One knob of TRL, transformers or PEFT. A subclass is one file and its only instance is ``TECHNIQUE``.

    Class attributes:
        name: the knob's spelling everywhere.
        summary: what it trades, in one sentence.
        options: its documented choices; a technique that takes more (numbers, a grammar) overrides :meth:`parse`.
        trl_default: what TRL does when it is told nothing.
        writes: the plan entries that it owns, as ``args.FIELD``, ``model.FIELD`` or ``truncate_to``; a further part
            names a key of a mapping, as in ``args.model_init_kwargs.use_kernels``.
        without_effect: by the name of a trainer whose configuration has the fields, why they do nothing there. Which
            other trainers have the technique follows from the fields of their configurations.
        refused: by the name of a trainer and a choice, why TRL refuses that choice there.
        needs: what it needs, in words, for the catalogue; empty when nothing.
        changes: how its training-changing choices change training, in words; empty when it has none.
        ordered: whether, all else equal, a larger choice never needs less memory. Lets one out-of-memory probe veto
            the candidates that it implies.
        only_sizes: whether it chooses the sizes of micro-batches and nothing else of a step, so that traces at other
            sizes stand for it.
        patches_libraries: whether it may change classes or functions of a library, which stay changed as long as their
            process lives: a trace without it then has another process.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    options: ClassVar[tuple[Option, ...]]
    trl_default: ClassVar[Choice]
    writes: ClassVar[frozenset[str]]
    without_effect: ClassVar[Mapping[str, str]] = {}
    refused: ClassVar[Mapping[tuple[str, Choice], str]] = {}
    needs: ClassVar[str] = ""
    changes: ClassVar[str] = ""
    ordered: ClassVar[bool] = False
    only_sizes: ClassVar[bool] = False
    patches_libraries: ClassVar[bool] = True

    def default(self, setting: Setting) -> Choice:
        """Return the choice of the baseline: TRL's default, as near as this setting allows."""
        return self.trl_default

    @abstractmethod
    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """Return the plan entries of a choice: a value for keys out of :attr:`writes`."""

    def parse(self, text: Choice, setting: Setting | None = None) -> Choice:
        """Return the choice that a spelling names; symbolic ones become concrete once there is a setting.

        Raises:
            InputError: no choice is spelled so.
        """
        spellings = {str(option.choice): option.choice for option in self.options}
        if str(text) in spellings:
            return spellings[str(text)]
        raise self.unknown(text)

    def unknown(self, text: Choice) -> InputError:
        """Return the error for a spelling that names no choice, with the nearest ones."""
        spellings = [str(option.choice) for option in self.options]
        near = difflib.get_close_matches(str(text), spellings, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        return InputError(f"{text!r} is no choice of {self.name}.", hint=f"{hint}It takes {', '.join(spellings)}.")

    def effect(self, choice: Choice, candidate: Candidate, setting: Setting) -> Effect:
        """Return what a choice does to training in this candidate."""
        return next((option.effect for option in self.options if option.choice == choice), Effect.EXACT)

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Return why this machine cannot do a choice at all, or None when it can."""
        return None

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return why a choice is impossible for this workload whatever else is chosen, or None when it is not."""
        return None

    def impossible(self, choice: Choice, setting: Setting) -> str | None:
        """Return why a choice is impossible here whatever else is chosen, or None when it is not."""
        return (
            self.unavailable(choice, setting.machine)
            or self.refused.get((setting.workload.trainer, choice))
            or self.unsuitable(choice, setting)
        )

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return why a choice is illegal or silently different in this candidate, or None when it is legal."""
        return None

    def layer_period(self, plan: TrainingPlan) -> int:
        """Return after how many layers what a plan says of this technique repeats: 2 for every second layer."""
        return 1

    def normal(self, choice: Choice, candidate: Candidate, setting: Setting) -> Choice:
        """Return the choice that stands for this one where several come to the same plan."""
        return choice
