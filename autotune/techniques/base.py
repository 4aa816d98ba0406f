"""Defines a technique: one knob, declared once, from which every spelling, table and plan entry derives."""

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
    """The effect of a choice on training. See law 3: the second kind is searched only when allowed by name."""

    EXACT = "exact"
    CHANGES_TRAINING = "changes-training"


@dataclass(frozen=True)
class Option:
    """One documented choice of a technique.

    Attributes:
        choice: its spelling; for a family of choices, a representative such as ``r16``.
        summary: what it does, in a few words.
        effect: its effect on training with all other techniques at TRL's defaults.
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
        trl_default: the choice that equals TRL's behaviour without any setting.
        trl_defaults: by the name of a trainer, the choice that does so there, if it differs.
        writes: the plan entries that it owns, as ``args.FIELD``, ``model.FIELD``, ``env.VARIABLE``, ``peft`` or
            ``truncate_to``; a further part names a key of a mapping, as in ``args.model_init_kwargs.use_kernels``.
        tells: those of :attr:`writes` by which a choice is told in a user's own configuration; empty: all. The others
            are settings beside the choice, of which a user's own are kept.
        without_effect: by the name of a trainer whose configuration has the fields, why they have no effect there.
            Which other trainers support the technique follows from the fields of their configurations.
        refused: by the name of a trainer and a choice, why TRL refuses that choice there.
        ignored: by the name of a trainer and a choice, how TRL silently trains otherwise there.
        restricted: by the name of a trainer and a choice, why only some candidates may have it there, for the
            documentation; :meth:`conflict` says which. For a family of choices, all three name its representative.
        unplanned: what of its effect is measured by probes and not part of an estimate, in words; empty if nothing.
        needs: its requirements, in words, for the catalogue; empty without any.
        changes: how its training-changing choices change training, in words; empty when it has none.
        changes_in: by the name of a trainer in which every choice but the default changes training, how it does.
        ordered: whether, all else equal, a larger choice never needs less memory. One out-of-memory probe then vetoes
            the candidates with larger choices.
        only_sizes: whether it changes only the sizes of micro-batches, so that its choices can be predicted from
            traces at other sizes.
        only_allocator: whether it changes only how the caching allocator serves the same allocations, so that its
            choices are predicted from the same trace (:class:`autotune.core.plan.AllocatorUse`).
        only_layers: whether it changes only what layers compute and save for the backward pass, and nothing of what is
            held between micro-batches.
        only_in: the phase of the step program that alone depends on it; empty if the steps do. A probe that runs out of
            memory elsewhere then shows the same of its other choices.
        also_sizes: whether it changes the batch geometry beside what else it changes.
        patches_libraries: whether it may patch classes or functions of a library, which stay patched until the process
            ends: a trace without it then needs another process.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    options: ClassVar[tuple[Option, ...]]
    trl_default: ClassVar[Choice]
    trl_defaults: ClassVar[Mapping[str, Choice]] = {}
    writes: ClassVar[frozenset[str]]
    tells: ClassVar[frozenset[str]] = frozenset()
    without_effect: ClassVar[Mapping[str, str]] = {}
    refused: ClassVar[Mapping[tuple[str, Choice], str]] = {}
    ignored: ClassVar[Mapping[tuple[str, Choice], str]] = {}
    restricted: ClassVar[Mapping[tuple[str, Choice], str]] = {}
    unplanned: ClassVar[str] = ""
    needs: ClassVar[str] = ""
    changes: ClassVar[str] = ""
    changes_in: ClassVar[Mapping[str, str]] = {}
    ordered: ClassVar[bool] = False
    only_sizes: ClassVar[bool] = False
    also_sizes: ClassVar[bool] = False
    only_allocator: ClassVar[bool] = False
    only_layers: ClassVar[bool] = False
    only_in: ClassVar[str] = ""
    patches_libraries: ClassVar[bool] = True

    def default(self, setting: Setting) -> Choice:
        """Return the choice of the baseline: TRL's default, or the closest choice that is possible here."""
        return self.trl_defaults.get(setting.workload.trainer, self.trl_default)

    def matters(self, setting: Setting) -> bool:
        """Return whether its choices differ in this setting; if not, it stays at its default."""
        return True

    @abstractmethod
    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """Return the plan entries of a choice: values for keys in :attr:`writes`."""

    def parse(self, text: Choice, setting: Setting | None = None) -> Choice:
        """Return the choice that a spelling names; with a setting, symbolic spellings are resolved to concrete ones.

        Raises:
            InputError: the spelling names no choice.
        """
        spellings = {str(option.choice): option.choice for option in self.options}
        if str(text) in spellings:
            return spellings[str(text)]
        raise self.unknown(text)

    def representative(self, choice: Choice) -> Choice:
        """Return the documented choice that stands for a choice: itself, unless it belongs to a family."""
        return choice

    def unknown(self, text: Choice) -> InputError:
        """Return the error for a spelling that names no choice, with the closest ones."""
        spellings = [str(option.choice) for option in self.options]
        near = difflib.get_close_matches(str(text), spellings, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        return InputError(f"{text!r} is no choice of {self.name}.", hint=f"{hint}It takes {', '.join(spellings)}.")

    def effect(self, choice: Choice, candidate: Candidate, setting: Setting) -> Effect:
        """Return the effect of a choice on training in this candidate."""
        if setting.workload.trainer in self.changes_in:
            default = self.normal(self.default(setting), candidate, setting)
            if self.normal(choice, candidate, setting) != default:
                return Effect.CHANGES_TRAINING
        return next((option.effect for option in self.options if option.choice == choice), Effect.EXACT)

    def unlike(self, choice: Choice, candidate: Candidate, setting: Setting) -> bool:
        """Return whether no other choice trains like one that a user's configuration has."""
        return self.effect(choice, candidate, setting) is Effect.CHANGES_TRAINING

    def meant(self, entries: Mapping[str, object], candidate: Candidate, setting: Setting) -> tuple[Choice, ...]:
        """Return choices, beside those of a space, that plan entries of a user's configuration may stand for.

        Args:
            entries: by path, of :attr:`writes`.
            candidate: what the other entries stand for.
        """
        return ()

    def how_changes(self, trainer: str) -> str:
        """Return how choices change training with the trainer of that name, in words; empty when none does."""
        return self.changes_in.get(trainer, self.changes)

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Return why a choice is not available on this machine, or None if it is."""
        return None

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return why a choice is impossible for this workload in every candidate, or None if it is possible."""
        return None

    def impossible(self, choice: Choice, setting: Setting) -> str | None:
        """Return why a choice is impossible in this setting in every candidate, or None if it is possible."""
        there = (setting.workload.trainer, self.representative(choice))
        return (
            self.unavailable(choice, setting.machine)
            or self.refused.get(there)
            or self.ignored.get(there)
            or self.unsuitable(choice, setting)
        )

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return why a choice is illegal or silently changed in this candidate, or None if it is legal."""
        return self.failure(choice, candidate, setting)

    def failure(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return why training with a choice fails in this candidate; None if it runs, or does something else silently.

        It is a part of :meth:`conflict`.
        """
        return None

    def layer_period(self, plan: TrainingPlan) -> int:
        """Return the period, in layers, of the technique's effect in a plan: 2 if it applies to every second layer."""
        return 1

    def uneven(self, plan: TrainingPlan) -> bool:
        """Return whether a process's share of a plan's gradients ends within a layer, and is no sum over layers."""
        return False

    def needs_all_layers(self, plan: TrainingPlan) -> bool:
        """Return whether moments of a step depend on where a process's share of the weights starts within the model.

        Traces of few layers then tell nothing of all of them.
        """
        return False

    def frees_weights(self, choice: Choice) -> bool:
        """Return whether fewer bytes of weights may lie on the device with a choice than with another."""
        return False

    def untimed(self, plan: TrainingPlan) -> bool:
        """Return whether a step of a plan on a GPU has no predicted time, since a part of it runs elsewhere."""
        return False

    def gathers_ahead(self, plan: TrainingPlan) -> bool:
        """Return whether weights of layers are gathered before these are reached, so that those at the ends differ."""
        return False

    def normal(self, choice: Choice, candidate: Candidate, setting: Setting) -> Choice:
        """Return the canonical choice among those that result in the same plan."""
        return choice


class NumberTechnique(Technique):
    """A technique whose choices are whole numbers; all but TRL's default change training.

    Class attributes:
        unit: what it counts, in the plural.
        least: the smallest number.
    """

    unit: ClassVar[str]
    least: ClassVar[int] = 1

    def parse(self, text: Choice, setting: Setting | None = None) -> Choice:
        """Return the number.

        Raises:
            InputError: it is none, or too small.
        """
        if str(text).isdigit() and int(text) >= self.least:
            return int(text)
        raise InputError(
            f"{text!r} is no choice of {self.name}.", hint=f"It takes a number of {self.unit}, at least {self.least}."
        )

    def effect(self, choice: Choice, candidate: Candidate, setting: Setting) -> Effect:
        """Any other number than TRL's default changes training."""
        return Effect.EXACT if choice == self.default(setting) else Effect.CHANGES_TRAINING
