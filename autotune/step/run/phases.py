"""Wraps methods of a trainer so that it reports the phase of the step program that it is in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from autotune.step.trainers.base import InPhase


def with_phases(subclass: type[Any], methods: Mapping[str, str], in_phase: InPhase) -> type[Any]:
    """Return a subclass of a trainer in which methods that form a phase of their own run inside ``in_phase``.

    Args:
        methods: method names by phase name.
    """
    for name, method in methods.items():
        around(subclass, method, functools.partial(in_phase, name))
    return subclass


def around(owner: Any, name: str, context: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Return a class, or an object, whose method of that name runs inside a context."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def told(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    setattr(owner, name, told)
    return owner
