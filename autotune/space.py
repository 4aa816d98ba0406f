"""Resolves the search space: the choices of a space file that the machine supports and the user allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from autotune.core.candidate import Candidate, Choice
from autotune.core.documents.unsearched import ExcludedChoice, Unlockable
from autotune.core.setting import Setting
from autotune.errors import InputError
from autotune.techniques import find
from autotune.techniques.base import Effect, Technique, how_changes, impossible


@dataclass(frozen=True)
class SpaceFile:
    """The content of a space file, checked against the catalogue.

    Attributes:
        choices: by knob, the spellings to try; symbolic ones not yet resolved.
        recipes: choices to try first, each on top of the baseline.
    """

    choices: Mapping[str, tuple[Choice, ...]]
    recipes: tuple[Mapping[str, Choice], ...]


@dataclass(frozen=True)
class Space:
    """The choices to search.

    Attributes:
        choices: by knob, the concrete choices, with the baseline's; a single one if the knob is not searched.
        recipes: complete candidates to try first.
        left_out: choices of the space file that are impossible here or conflict with the user's.
        unlockable: choices that ``--allow`` would add.
        file: the space file.
    """

    choices: Mapping[str, tuple[Choice, ...]]
    recipes: tuple[Candidate, ...]
    left_out: tuple[ExcludedChoice, ...]
    unlockable: tuple[Unlockable, ...]
    file: SpaceFile


def resolve(file: SpaceFile, techniques: Iterable[Technique], setting: Setting) -> Space:
    """Return the space to search in a setting.

    Raises:
        InputError: a fixed choice is impossible on this machine.
    """
    techniques = tuple(techniques)
    baseline = starting_point(techniques, setting)
    surroundings = [baseline, *_allowed(file, techniques, baseline, setting)]
    kept = setting.base.unsearched if setting.base is not None else {}
    choices: dict[str, tuple[Choice, ...]] = {}
    left_out: list[ExcludedChoice] = []
    unlockable: list[Unlockable] = []
    for technique in techniques:
        knob = technique.name
        free = knob not in setting.fixed and knob not in setting.excluded and technique.matters(setting)
        if free and knob in kept:
            others = (technique.parse(spelling, setting) for spelling in file.choices.get(knob, ()))
            others = (other for other in dict.fromkeys(others) if other != baseline[knob])
            left_out += [ExcludedChoice(knob, other, kept[knob]) for other in others]
        if not free or knob in kept or knob not in file.choices:
            choices[knob] = (baseline[knob],)
            continue
        searched, locked = [baseline[knob]], []
        for spelling in file.choices[knob]:
            choice = technique.parse(spelling, setting)
            reason = impossible(technique, choice, setting)
            reason = reason or _ruled_out(knob, choice, baseline, techniques, setting)
            if reason:
                left_out.append(ExcludedChoice(knob, choice, reason))
            elif knob in setting.allowed or _may_be_exact(technique, choice, surroundings, setting):
                searched.append(choice)
            else:
                locked.append(choice)
        choices[knob] = tuple(dict.fromkeys(searched))
        if locked:
            how = how_changes(technique, setting.workload.trainer, setting.loss_depends_on)
            unlockable.append(Unlockable(knob, tuple(locked), how))
    # A recipe is tried without its choices of knobs that are not searched.
    parsed = (
        {knob: find(knob, techniques).parse(spelling, setting) for knob, spelling in recipe.items() if knob not in kept}
        for recipe in file.recipes
    )
    recipes = (baseline.but(**recipe) for recipe in parsed)
    usable = (recipe for recipe in recipes if all(choice in choices[knob] for knob, choice in recipe.items()))
    return Space(choices, tuple(dict.fromkeys(usable)), tuple(left_out), tuple(unlockable), file)


def starting_point(techniques: Iterable[Technique], setting: Setting) -> Candidate:
    """Return the baseline: TRL's defaults, or the user's own configuration, with the choices that the user fixed.

    Raises:
        InputError: a fixed choice is impossible on this machine.
    """
    start: dict[str, Choice] = {}
    fixed = setting.fixed
    for technique in techniques:
        if technique.name not in fixed:
            start[technique.name] = _default_choice(technique, setting)
            continue
        choice = technique.parse(fixed[technique.name], setting)
        reason = impossible(technique, choice, setting)
        if reason:
            raise InputError(f"--fix {technique.name}={choice} is not possible here: {reason}.")
        start[technique.name] = choice
    return Candidate(start)


def _default_choice(technique: Technique, setting: Setting) -> Choice:
    """Return the choice of a technique that the user did not fix.

    Raises:
        InputError: the choice of the user's configuration is impossible on this machine.
    """
    base = setting.base
    if base is None or technique.name not in base.choices:
        return technique.default(setting)
    choice = base.choices[technique.name]
    reason = impossible(technique, choice, setting) if technique.name in base.unsearched else None
    if reason:
        raise InputError(
            f"{technique.name}={choice} of {base.file} is not possible here: {reason}.",
            hint=f"Write another value, or give --fix {technique.name}=CHOICE.",
        )
    return choice


def _ruled_out(
    knob: str, choice: Choice, baseline: Candidate, techniques: Iterable[Technique], setting: Setting
) -> str | None:
    """Return why a choice conflicts with a fixed choice, or None."""
    with_it = baseline.but(**{knob: choice})
    for fixed in (technique for technique in techniques if technique.name in setting.fixed):
        mine = baseline[fixed.name]
        conflict = fixed.conflict(mine, with_it, setting)
        if conflict and not fixed.conflict(mine, baseline, setting):
            return conflict
    return None


def _allowed(
    file: SpaceFile, techniques: Iterable[Technique], baseline: Candidate, setting: Setting
) -> Iterator[Candidate]:
    """Yield the baseline with each choice of a knob that the user allowed; a fixed knob has one choice."""
    for technique in techniques:
        if technique.name in file.choices.keys() & setting.allowed - setting.fixed.keys():
            for spelling in file.choices[technique.name]:
                yield baseline.but(**{technique.name: technique.parse(spelling, setting)})


def _may_be_exact(technique: Technique, choice: Choice, surroundings: Iterable[Candidate], setting: Setting) -> bool:
    # A choice can be exact in combination with another that the user allowed, such as bf16 weights with LoRA, which
    # freezes them.
    every = (around.but(**{technique.name: choice}) for around in surroundings)
    return any(technique.effect(choice, each, setting) is Effect.EXACT for each in every)
