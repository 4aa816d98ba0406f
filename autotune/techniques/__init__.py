"""The technique catalogue: an instance of each knob's subclass of :class:`Technique` in the modules of this package."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from functools import cache

from autotune.errors import InputError, suggestion
from autotune.techniques.base import Technique


@cache
def catalogue() -> tuple[Technique, ...]:
    """Return all techniques, sorted by name; each trainer supports a subset."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    # Bases have no summary.
    classes = {
        item
        for module in modules
        for item in vars(module).values()
        if isinstance(item, type) and issubclass(item, Technique) and hasattr(item, "summary")
    }
    return tuple(sorted((item() for item in classes), key=lambda item: item.name))


def find(knob: str, techniques: Iterable[Technique]) -> Technique:
    """Return the technique named ``knob``.

    Raises:
        InputError: there is none; the message suggests the closest names.
    """
    named = {item.name: item for item in techniques}
    if knob in named:
        return named[knob]
    if any(knob == item.name for item in catalogue()):
        where, near = " for this trainer", ""
    else:
        where, near = "", suggestion(knob, named)
    raise InputError(f"There is no knob {knob!r}{where}.", hint=f"{near}The knobs are {', '.join(named)}.")
