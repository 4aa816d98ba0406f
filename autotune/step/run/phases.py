"""Trainers that tell in which phase of their step program they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from autotune.step.trainers.base import InPhase


def tell_phases(subclass: type[Any], methods: Mapping[str, str], in_phase: InPhase) -> type[Any]:
    """Return a subclass of a trainer, changed so that the methods that are phases of their own tell so.

    Args:
        methods: by the name of a phase, the method that it is.
    """
    for name, method in methods.items():
        setattr(subclass, method, _told(getattr(subclass, method), name, in_phase))
    return subclass


def _told(method: Callable[..., Any], name: str, in_phase: InPhase) -> Callable[..., Any]:
    @functools.wraps(method)
    def told(*args: Any, **kwargs: Any) -> Any:
        with in_phase(name):
            return method(*args, **kwargs)

    return told
