"""The technique catalogue: every module of this package that declares a ``TECHNIQUE`` is in it."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from functools import cache

from autotune.errors import InputError
from autotune.techniques.base import Technique

__all__ = ["catalogue", "find"]


@cache
def catalogue(trainer: str | None = None) -> tuple[Technique, ...]:
    """Return all techniques in the order of their names, or those that one trainer has."""
    modules = (importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__))
    declared = [module.TECHNIQUE for module in modules if hasattr(module, "TECHNIQUE")]
    return tuple(
        sorted((item for item in declared if trainer is None or trainer in item.trainers), key=lambda item: item.name)
    )


def find(knob: str, trainer: str | None = None) -> Technique:
    """Return the technique with that name.

    Raises:
        InputError: there is none; the message names the nearest.
    """
    techniques = {item.name: item for item in catalogue(trainer)}
    if knob in techniques:
        return techniques[knob]
    near = difflib.get_close_matches(knob, techniques, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise InputError(f"There is no knob {knob!r}.", hint=f"{hint}The knobs are {', '.join(techniques)}.")
