"""The trainers of TRL that autotune knows, by the name that ``trl`` and ``--trainer`` use."""

from __future__ import annotations

from autotune.errors import InputError
from autotune.trainers.base import Trainer
from autotune.trainers.sft import SFT

TRAINERS: dict[str, Trainer] = {trainer.name: trainer for trainer in (SFT,)}

__all__ = ["TRAINERS", "Trainer", "find_trainer"]


def find_trainer(name: str) -> Trainer:
    """Return the trainer with that name.

    Raises:
        InputError: there is none.
    """
    if name not in TRAINERS:
        raise InputError(f"There is no trainer {name!r}.", hint=f"autotune knows {', '.join(TRAINERS)}.")
    return TRAINERS[name]
