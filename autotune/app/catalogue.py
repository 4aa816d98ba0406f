"""The use case of ``autotune techniques``: lists the techniques, and which choices can be used."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.app.arguments import CatalogueArguments
from autotune.app.public import signature_from
from autotune.core.documents.catalogue import CatalogueOption, CatalogueRow
from autotune.core.machine import Machine
from autotune.inspection.machine import machine as inspect_machine
from autotune.inspection.space_file import default_file, load
from autotune.techniques.base import Option, Technique, default_with, effect_with, how_changes, refused_or_ignored
from autotune.trainers import find_trainer
from autotune.trainers.base import Trainer


@signature_from(CatalogueArguments)
def catalogue(args: CatalogueArguments) -> tuple[CatalogueRow, ...]:
    """Return the techniques of a trainer, and for each choice whether the trainer and this machine support it.

    Raises:
        InputError: there is no such trainer, or the device cannot be used.
    """
    known = find_trainer(args.trainer)
    machine = inspect_machine(args.device)
    searched = load(default_file(known.name), known.name, known.techniques).choices
    return tuple(_row(technique, known, machine, technique.name in searched) for technique in known.techniques)


def _row(technique: Technique, trainer: Trainer, machine: Machine, in_default_space: bool) -> CatalogueRow:
    depends = trainer.loss_depends_on({})
    return CatalogueRow(
        knob=technique.name,
        summary=technique.summary,
        needs=technique.needs,
        changes=how_changes(technique, trainer.name, depends),
        writes=tuple(sorted(technique.writes)),
        in_default_space=in_default_space,
        default=str(default_with(technique, trainer.name)),
        options=tuple(_option(technique, option, machine, trainer.name, depends) for option in technique.options),
    )


def _option(
    technique: Technique, option: Option, machine: Machine, trainer: str, depends: Mapping[str, str]
) -> CatalogueOption:
    reason = refused_or_ignored(technique, option.choice, trainer) or technique.unavailable(option.choice, machine)
    effect = effect_with(technique, option, trainer, depends)
    return CatalogueOption(option.choice, option.summary, effect.value, not reason, reason or "")
