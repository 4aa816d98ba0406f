"""The child's side of each trainer: the :class:`Adapter` that the module of the trainer's name defines."""

from __future__ import annotations

import importlib
from functools import cache

from autotune.step.trainers.base import Adapter
from autotune.trainers import trainers

__all__ = ["Adapter", "adapters", "find_adapter"]


def adapters() -> dict[str, Adapter]:
    """Return all adapters by the name of their trainer."""
    return {name: find_adapter(name) for name in trainers()}


@cache
def find_adapter(trainer: str) -> Adapter:
    """Return the adapter of a trainer by importing its module alone, which has the trainer's name."""
    module = importlib.import_module(f"{__name__}.{trainer}")
    own = (item for item in vars(module).values() if isinstance(item, type) and item.__module__ == module.__name__)
    return next(item() for item in own if issubclass(item, Adapter))
