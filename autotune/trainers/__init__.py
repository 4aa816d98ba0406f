"""The supported trainers of TRL: every module of this package that declares a ``TRAINER``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from autotune.core.candidate import Candidate
from autotune.core.documents.length_report import LengthLimit
from autotune.core.setting import Setting
from autotune.errors import InputError, suggestion
from autotune.techniques import catalogue
from autotune.techniques.base import Technique, facts
from autotune.techniques.max_length import MaxLength, is_unlimited, limit_with
from autotune.techniques.packing import NONE
from autotune.trainers.base import Trainer

DEFAULT = "sft"
"""The default trainer."""
REMOVED: Mapping[str, str] = {"ppo": "1.13", "bco": "1.14", "nash_md": "1.14", "prm": "1.14", "xpo": "1.14"}
"""Removed trainers of TRL, with the release that removed them."""

__all__ = ["DEFAULT", "Trainer", "find_trainer", "length_limit", "limits_rows", "techniques_of", "trainers"]


@cache
def trainers() -> dict[str, Trainer]:
    """Return all trainers by name, the default first."""
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    declared: list[Trainer] = [module.TRAINER for module in modules if hasattr(module, "TRAINER")]
    return {item.name: item for item in sorted(declared, key=lambda item: (item.name != DEFAULT, item.name))}


def find_trainer(name: str) -> Trainer:
    """Return the trainer with that name.

    Raises:
        InputError: there is none.
    """
    if name in trainers():
        return trainers()[name]
    removed = REMOVED.get(name.lower().replace("-", "_"))
    message = (
        f"TRL has no trainer {name!r} since release {removed}."
        if removed
        else f"autotune does not support the trainer {name!r}."
    )
    raise InputError(message, hint=f"{suggestion(name, trainers())}Supported are {', '.join(trainers())}.")


@cache
def techniques_of(trainer: Trainer) -> tuple[Technique, ...]:
    """Return the techniques of a trainer, sorted by name: those whose fields its configuration has, and with an effect.

    A field that no trainer declares belongs to ``transformers.TrainingArguments``, which all trainers have.
    """
    own = frozenset().union(*(item.fields for item in (*trainers().values(), trainer)))
    return tuple(
        technique
        for technique in catalogue()
        if not facts(technique, trainer.name).without_effect and _arguments(technique) & own <= trainer.fields
    )


def _arguments(technique: Technique) -> frozenset[str]:
    """Return the fields of a trainer's configuration that a technique writes."""
    return frozenset(path.split(".")[1] for path in technique.writes if path.startswith("args."))


def limits_rows(trainer: Trainer) -> bool:
    """Return whether a trainer has a ``max_length`` that cuts or drops rows of the dataset."""
    return MaxLength.name in trainer.fields and not facts(MaxLength, trainer.name).changes


def length_limit(trainer: Trainer, setting: Setting, candidate: Candidate) -> LengthLimit | None:
    """Return the tokens and rows that a candidate's maximum length keeps; None if none applies to rows."""
    if not limits_rows(trainer) or is_unlimited(candidate["max_length"], candidate, setting):
        return None
    documents = setting.workload.dataset.documents
    return limit_with(documents, int(candidate["max_length"]), candidate.get("packing", NONE))
