"""Converts a user's plan to the nearest candidate, so that the techniques' rules and choices apply to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.core.candidate import Candidate, Choice
from autotune.core.machine import Machine
from autotune.core.plan import TrainingPlan
from autotune.core.setting import GLOBAL_BATCH, Setting
from autotune.core.workload import Workload
from autotune.errors import InputError
from autotune.space import SpaceFile
from autotune.techniques.base import Technique
from autotune.trainers.base import Trainer

# A second pass, since choices depend on one another, as use_peft on lora and peft_config.
_PASSES = 2


@dataclass(frozen=True)
class NearestCandidate:
    """The candidate nearest to a plan, and the techniques that match it exactly.

    Attributes:
        candidate: the choices; the nearest one if none matches.
        exact: the techniques whose choice matches the plan.
    """

    candidate: Candidate
    exact: frozenset[str]


def setting_of(plan: TrainingPlan, trainer: Trainer, workload: Workload, machine: Machine, documents: int) -> Setting:
    """Return the setting of a user's own plan, in which every technique is allowed.

    Args:
        documents: documents per optimizer step.
    """
    allowed = frozenset({GLOBAL_BATCH, *(technique.name for technique in trainer.techniques)})
    processes = plan.launch.processes
    depends = trainer.loss_depends_on(plan.args, workload.model, processes, workload.dataset.columns)
    ranks = processes // plan.data_ranks
    return Setting(workload, machine, documents, 0.0, allowed, ranks_per_row=ranks, loss_depends_on=depends)


def as_candidate(plan: TrainingPlan, trainer: Trainer, setting: Setting, file: SpaceFile) -> NearestCandidate:
    """Return the candidate whose plan is nearest to a plan."""
    candidate = trainer.defaults(setting)
    exact: set[str] = set()
    for _ in range(_PASSES):
        exact = set()
        for technique in trainer.techniques:
            choice, same = _nearest(technique, plan, candidate, setting, file.choices.get(technique.name, ()))
            candidate = candidate.but(**{technique.name: choice})
            exact |= {technique.name} if same else set()
    return NearestCandidate(candidate, frozenset(exact))


def _nearest(
    technique: Technique, plan: TrainingPlan, candidate: Candidate, setting: Setting, listed: tuple[Choice, ...]
) -> tuple[Choice, bool]:
    """Return the choice whose entries agree with a plan the most, and whether all of them do."""
    found: list[tuple[tuple[bool, float, bool], Choice]] = []
    default = technique.plan(technique.default(setting), candidate, setting)
    # A plan has all arguments of the trainer, but only those model arguments that differ from TRL's defaults.
    omitted = {path: value for path, value in default.items() if path.startswith("model.")}
    own = {path: plan.entry(path) for path in technique.writes}
    further = technique.spellings(own, candidate, setting)
    every = (option.choice for option in technique.options)
    for spelling in (*_numbers(technique, plan), *further, technique.default(setting), *listed, *every):
        try:
            choice = technique.parse(spelling, setting)
        except InputError:
            continue
        changed = candidate.but(**{technique.name: choice})
        entries = _identifying(technique, technique.plan(choice, changed, setting))
        agreeing = sum(_agrees(value, plan.entry(path), omitted.get(path)) for path, value in entries.items())
        whole = agreeing == len(entries)
        # Among choices with the same entries, one without a conflict with the other techniques is preferred.
        possible = technique.conflict(choice, changed, setting) is None
        found.append(((whole, agreeing if whole else agreeing / len(entries), possible), choice))
    (whole, agreed, _), choice = max(found, key=lambda item: item[0])
    # A choice without entries agrees with everything; another one's switch may be on.
    switched = not agreed and any(plan.entry(path) not in (None, False) for path in technique.writes)
    return choice, whole and not switched


def _numbers(technique: Technique, plan: TrainingPlan) -> tuple[Choice, ...]:
    """Return the plan's numbers at the paths that a technique writes."""
    values = (plan.entry(path) for path in sorted(technique.writes))
    return tuple(value for value in values if isinstance(value, int) and not isinstance(value, bool))


def _identifying(technique: Technique, entries: Mapping[str, object]) -> Mapping[str, object]:
    """Return the entries that identify a choice: of a technique of sizes, only the field of its own name."""
    if technique.identified_by:
        return {path: value for path, value in entries.items() if path in technique.identified_by}
    named = f"args.{technique.name}"
    return {named: entries[named]} if named in entries and technique.impact.sets_only_sizes else entries


def _agrees(value: object, actual: object, default: object) -> bool:
    return value == actual or (actual is None and (value in (False, None, {}) or value == default))
