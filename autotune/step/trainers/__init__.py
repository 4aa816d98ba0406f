"""The child's side of each trainer: every module of this package that declares an ``ADAPTER``."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from autotune.step.trainers.base import Adapter

__all__ = ["Adapter", "adapters", "find_adapter"]


@cache
def adapters() -> dict[str, Adapter]:
    """Return all adapters by the name of their trainer."""
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    return {module.ADAPTER.specification.name: module.ADAPTER for module in modules if hasattr(module, "ADAPTER")}


def find_adapter(trainer: str) -> Adapter:
    """Return the adapter of a trainer by importing its module alone, which has the trainer's name."""
    module = importlib.import_module(f"{__name__}.{trainer}")
    found: Adapter = module.ADAPTER
    return found
