"""The supported trainers of TRL: every module of this package that declares a ``TRAINER``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from autotune.errors import InputError, suggestion

if TYPE_CHECKING:
    # The names of trainers, which any command's help needs, load none of them.
    from autotune.trainers.base import Trainer

DEFAULT = "sft"
"""The default trainer."""
REMOVED: Mapping[str, str] = {"ppo": "1.13", "bco": "1.14", "nash_md": "1.14", "prm": "1.14", "xpo": "1.14"}
"""Removed trainers of TRL, with the release that removed them."""


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
