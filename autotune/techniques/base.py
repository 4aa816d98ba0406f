"""Defines a technique: one knob, declared once, from which every spelling, table and plan entry derives."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from math import nan
from typing import ClassVar

from autotune.core.candidate import Candidate, Choice
from autotune.core.machine import Machine
from autotune.core.setting import Setting
from autotune.errors import InputError, suggestion
from autotune.techniques.trace_impact import TraceImpact
from autotune.techniques.versions import missing

OFF = "off"
ON = "on"
_VALUES: Mapping[Choice, object] = {OFF: False, ON: True, "none": None}
"""Field values of choices that are spelled differently."""
POSITIVE = re.compile(r"0*[1-9][0-9]*")
"""Pattern of whole numbers of at least 1."""
SEVERAL = re.compile(r"0*([2-9]|[1-9][0-9]+)")
"""Pattern of whole numbers of at least 2."""


class Effect(StrEnum):
    """The effect of a choice on training. See law 3: the second kind is searched only when allowed by name."""

    EXACT = "exact"
    CHANGES_TRAINING = "changes-training"


class CrashReason(str):
    """A conflict that makes training fail, rather than silently train something else."""

    __slots__ = ()


class UnsearchedReason(str):
    """A conflict that excludes a choice from the search although training may work; a check does not report it."""

    __slots__ = ()


@dataclass(frozen=True)
class Option:
    """One documented choice of a technique.

    Attributes:
        choice: its spelling; for a family of choices, a representative such as ``r16``.
        summary: its effect, in a few words.
        effect: its effect on training with all other techniques at TRL's defaults; :func:`effect_with` returns the
            effect for a trainer.
        family: pattern of the choices that it represents, itself included; None: only itself. Choices of digits are
            whole numbers.
        replaceable: whether an exact choice may replace it in a user's own configuration.
        package: the required distribution; empty if it needs none.
        without_gpu: why it is unavailable on a CPU; empty if it is available.
        entries: its plan entries; an empty mapping leaves the field at its default. None: the spelling is the value of
            the technique's only field.
    """

    choice: Choice
    summary: str
    effect: Effect = Effect.EXACT
    family: re.Pattern[str] | None = None
    replaceable: bool = True
    package: str = ""
    without_gpu: str = ""
    entries: Mapping[str, object] | None = None

    def has(self, choice: Choice) -> bool:
        """Return whether a choice, or the spelling of one, is this one or of its family."""
        return str(choice) == str(self.choice) or bool(self.family and self.family.fullmatch(str(choice)))


@dataclass(frozen=True)
class TrainerFacts:
    """The differences of a technique with one trainer. Reasons are empty if there is none.

    Attributes:
        default: the choice that equals TRL's behaviour without any setting; None: that of all trainers.
        changes: how every choice but the default changes training with this trainer.
        without_effect: why the fields have no effect. Other trainers support the technique if their configurations have
            its fields.
        refused: by choice, why TRL refuses it.
        ignored: by choice, how TRL silently trains something else.
        restricted: by choice, why only some candidates may have it, for the documentation;
            :meth:`Technique.conflict` decides which. For a family of choices, all three name its representative.
    """

    default: Choice | None = None
    changes: str = ""
    without_effect: str = ""
    refused: Mapping[Choice, str] = field(default_factory=dict)
    ignored: Mapping[Choice, str] = field(default_factory=dict)
    restricted: Mapping[Choice, str] = field(default_factory=dict)


class Technique:
    """One knob of TRL, transformers or PEFT. Each subclass with a summary is one knob and one file; others are bases.

    Class attributes:
        name: the knob's spelling everywhere; by default, the name of its file.
        summary: its trade-off, in one sentence.
        options: its documented choices; a technique whose spellings depend on the setting overrides :meth:`parse`.
        trl_default: the choice that equals TRL's behaviour without any setting; by default, the first of the options.
        needs: its requirements, for the catalogue; empty without any.
        changes: how its training-changing choices change training; empty when it has none.
        writes: the plan entries that it owns, as ``args.FIELD``, ``model.FIELD``, ``env.VARIABLE``, ``peft`` or
            ``truncate_to``; a further part names a key of a mapping, as in ``args.model_init_kwargs.use_kernels``. By
            default, the field of its name.
        identified_by: the entries of :attr:`writes` that identify a choice in a user's own configuration; empty: all.
            The others are further settings; in a user's own engine document, they are kept.
        by_trainer: facts that depend on the trainer, by its name.
        impact: the effect of its choices on a trace.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    options: ClassVar[tuple[Option, ...]]
    trl_default: ClassVar[Choice]
    needs: ClassVar[str] = ""
    changes: ClassVar[str] = ""
    writes: ClassVar[frozenset[str]]
    identified_by: ClassVar[frozenset[str]] = frozenset()
    by_trainer: ClassVar[Mapping[str, TrainerFacts]] = {}
    impact: ClassVar[TraceImpact] = TraceImpact()

    def __init_subclass__(cls) -> None:
        cls.name = vars(cls).get("name", cls.__module__.rpartition(".")[2])
        cls.writes = vars(cls).get("writes", frozenset({f"args.{cls.name}"}))
        if "options" in vars(cls) and "trl_default" not in vars(cls):
            cls.trl_default = cls.options[0].choice

    def default(self, setting: Setting) -> Choice:
        """Return the baseline's choice: TRL's default, or the closest possible choice."""
        return default_with(self, setting.workload.trainer)

    def matters(self, setting: Setting) -> bool:
        """Return whether its choices differ in this setting; if not, it stays at its default."""
        return True

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """Return the plan entries of a choice: values for keys in :attr:`writes`; see :attr:`Option.entries`."""
        option = option_of(self, choice)
        if option is not None and option.entries is not None:
            return option.entries
        (entry,) = self.writes
        return {entry: _VALUES.get(choice, choice)}

    def parse(self, text: Choice, setting: Setting | None = None) -> Choice:
        """Return the choice that a spelling names; with a setting, symbolic spellings are resolved to concrete ones.

        Raises:
            InputError: the spelling names no choice.
        """
        spelling = str(text)
        if any(option.has(spelling) for option in self.options):
            return int(spelling) if spelling.isdecimal() else spelling
        spellings = [str(option.choice) for option in self.options]
        listed = ", ".join(
            f"{option.choice} ({option.summary})" if option.family else str(option.choice) for option in self.options
        )
        raise InputError(
            f"{text!r} is not a choice of {self.name}.", hint=f"{suggestion(spelling, spellings)}It takes {listed}."
        )

    def effect(self, choice: Choice, candidate: Candidate, setting: Setting) -> Effect:
        """Return the effect of a choice on training in this candidate."""
        if self.name in setting.loss_depends_on or facts(self, setting.workload.trainer).changes:
            default = self.normal(self.default(setting), candidate, setting)
            if self.normal(choice, candidate, setting) != default:
                return Effect.CHANGES_TRAINING
        option = option_of(self, choice)
        return option.effect if option else Effect.EXACT

    def spellings(self, entries: Mapping[str, object], candidate: Candidate, setting: Setting) -> tuple[Choice, ...]:
        """Return choices, in addition to those of a space, that may match the entries of a user's configuration.

        Args:
            entries: the entries at the paths of :attr:`writes`.
            candidate: the choices of the other techniques.
        """
        return ()

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Return why a choice is not available on this machine, or None if it is."""
        option = option_of(self, choice)
        return _lacking(option, machine) if option else None

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return why a choice is impossible for this workload in every candidate, or None if it is possible."""
        return None

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return why a choice is illegal or silently changed in this candidate, or None if it is legal.

        The reason is a :class:`CrashReason` if training fails.
        """
        return None

    def normal(self, choice: Choice, candidate: Candidate, setting: Setting) -> Choice:
        """Return the canonical choice among those that result in the same plan."""
        return choice


class Equipped(Technique):
    """A technique whose choices, except TRL's default, need a GPU, a package, or rows without images.

    Class attributes:
        without_gpu: why it is unavailable on a CPU; empty if it is available.
        package: the required distribution; empty if it needs none.
        with_images: why it is impossible for rows with images; empty if it is possible.
    """

    without_gpu: ClassVar[str] = ""
    package: ClassVar[str] = ""
    with_images: ClassVar[str] = ""

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Return why a choice is not available on this machine, or None if it is."""
        return None if choice == self.trl_default else _lacking(self, machine)

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return why a choice is impossible for this workload in every candidate, or None if it is possible."""
        return self.with_images or None if choice != self.trl_default and setting.workload.has_images else None


class Distributed(Technique):
    """A technique that matters only with enough training processes.

    Class attributes:
        fewest_processes: least number of processes for which its choices differ.
    """

    fewest_processes: ClassVar[int] = 2

    def matters(self, setting: Setting) -> bool:
        """Return whether there are at least :attr:`fewest_processes`."""
        return setting.machine.hardware.processes >= self.fewest_processes


class NumberTechnique(Technique):
    """A technique whose choices are numbers; all but TRL's default change training."""

    def effect(self, choice: Choice, candidate: Candidate, setting: Setting) -> Effect:
        """Return the effect: any number but TRL's default changes training."""
        return Effect.EXACT if choice == self.default(setting) else Effect.CHANGES_TRAINING


def _lacking(needs: Option | Equipped, machine: Machine) -> str | None:
    """Return a reason if a machine lacks a requirement of a choice or a technique; None otherwise."""
    if needs.without_gpu and machine.hardware.kind == "cpu":
        return needs.without_gpu
    return missing(needs.package, machine) if needs.package else None


def real_number(technique: Technique, text: Choice, takes: str, is_possible: Callable[[float], bool]) -> str:
    """Return the real number that a spelling names, as Python spells it.

    Args:
        takes: the possible numbers.
        is_possible: returns whether a number is possible; must be false for NaN.

    Raises:
        InputError: it is not a possible number.
    """
    try:
        number = float(text)
    except ValueError:
        number = nan
    if not is_possible(number):
        raise InputError(f"{text!r} is not a choice of {technique.name}.", hint=f"It takes {takes}.")
    return str(number)


def facts(technique: Technique | type[Technique], trainer: str) -> TrainerFacts:
    """Return the facts of a technique that depend on the trainer of that name."""
    return technique.by_trainer.get(trainer, _NO_DIFFERENCE)


_NO_DIFFERENCE = TrainerFacts()


def differing(**trainers: TrainerFacts) -> Mapping[str, TrainerFacts]:
    """Return the facts of a technique that depend on the trainer, by its name: :attr:`Technique.by_trainer`."""
    return trainers


def default_with(technique: Technique | type[Technique], trainer: str) -> Choice:
    """Return the choice that equals TRL's behaviour with the trainer of that name without any setting."""
    own = facts(technique, trainer).default
    return technique.trl_default if own is None else own


def effect_with(technique: Technique, option: Option, trainer: str, loss_depends_on: Mapping[str, str]) -> Effect:
    """Return the effect of a documented choice with the trainer of that name, all other techniques at TRL's defaults.

    Args:
        loss_depends_on: by knob, as in :class:`~autotune.core.setting.Setting`.
    """
    if option.choice == default_with(technique, trainer):
        return Effect.EXACT
    any_other = technique.name in loss_depends_on or facts(technique, trainer).changes
    return Effect.CHANGES_TRAINING if any_other or isinstance(technique, NumberTechnique) else option.effect


@cache  # called for every combination of a space
def option_of(technique: Technique, choice: Choice) -> Option | None:
    """Return the documented choice that represents a choice, or None."""
    exact = (option for option in technique.options if option.choice == choice)
    return next(exact, None) or next((option for option in technique.options if option.has(choice)), None)


def how_changes(technique: Technique, trainer: str, loss_depends_on: Mapping[str, str]) -> str:
    """Return how choices change training with the trainer of that name; empty when none does.

    Args:
        loss_depends_on: by knob, as in :class:`~autotune.core.setting.Setting`.
    """
    return loss_depends_on.get(technique.name) or facts(technique, trainer).changes or technique.changes


def refused_or_ignored(technique: Technique, choice: Choice, trainer: str) -> str | None:
    """Return why TRL refuses or silently changes a choice with a trainer; None if it supports the choice."""
    option, own = option_of(technique, choice), facts(technique, trainer)
    return (own.refused.get(option.choice) or own.ignored.get(option.choice)) if option else None


def impossible(technique: Technique, choice: Choice, setting: Setting) -> str | None:
    """Return why a choice is impossible in this setting in every candidate, or None if it is possible."""
    key = technique, choice
    if key not in setting.impossible:
        setting.impossible[key] = (
            refused_or_ignored(technique, choice, setting.workload.trainer)
            or technique.unavailable(choice, setting.machine)
            or technique.unsuitable(choice, setting)
        )
    return setting.impossible[key]


def illegal(technique: Technique, candidate: Candidate, setting: Setting) -> str | None:
    """Return why the choice of a technique may not be tried in a candidate, or None when it may."""
    choice = candidate[technique.name]
    reason = impossible(technique, choice, setting)
    if reason:
        return f"{technique.name}={choice}: {reason}"
    conflict = technique.conflict(choice, candidate, setting) or _absent(technique, candidate, setting)
    if conflict:
        return conflict
    changes = technique.effect(choice, candidate, setting) is Effect.CHANGES_TRAINING
    if changes and technique.name not in setting.allowed and not setting.is_users_choice(technique.name, choice):
        how = how_changes(technique, setting.workload.trainer, setting.loss_depends_on)
        return f"{technique.name}={choice} changes training here ({how}) and was not allowed (--allow {technique.name})"
    return None


def _absent(technique: Technique, candidate: Candidate, setting: Setting) -> str | None:
    """Return why the installed TRL has no field for a choice, or None; the default choice needs no field."""
    absent, choice = setting.workload.absent, candidate[technique.name]
    if not absent or choice == technique.default(setting):
        return None
    without_field = technique.plan(choice, candidate, setting).keys() & absent
    if not without_field:
        return None
    return f"{technique.name}={choice}: the installed TRL has no field for {min(without_field)}"
