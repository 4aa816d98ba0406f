"""Wraps methods of a trainer so that it reports the phase of the step program that it is in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from autotune.step.trainers.base import InPhase


def tell_phases(subclass: type[Any], methods: Mapping[str, str], in_phase: InPhase) -> type[Any]:
    """Return a subclass of a trainer in which methods that form a phase of their own run inside ``in_phase``.

    Args:
        methods: method names by phase name.
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
