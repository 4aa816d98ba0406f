"""What a call of the API was asked for: those of its arguments that differ from their defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path

from autotune.confidential import hidden_url, hidden_values

_NO_OPTIONS = ("listener",)


def given(function: Callable[..., object], arguments: Mapping[str, object]) -> dict[str, object]:
    """Return what was asked for in a call, by the names of the function's parameters and in their order.

    It is what ``settings`` in ``result.json`` and in a plan's document have, and what the command that repeats a run is
    made of. It follows from the signature alone, so that a new option is in it.

    What is secret in it, such as the password of a storage, is left out, since these documents are shown to others.

    Args:
        arguments: every argument of the call by name, as ``locals()`` has them in the function's first line.
    """
    parameters = inspect.signature(function).parameters
    values = {name: _as_json(arguments[name]) for name in parameters if name not in _NO_OPTIONS}
    if isinstance(storage := values.get("storage"), str):
        values["storage"] = hidden_url(storage)
    values = hidden_values(values)
    return {name: value for name, value in values.items() if not _is_default(value, parameters[name].default)}


def _is_default(value: object, default: object) -> bool:
    return value is None or value in ([], {}) or value == default


def _as_json(value: object) -> object:
    match value:
        case Path():
            return str(value)
        case Mapping():
            return dict(value)
        case list() | tuple() | set() | frozenset():
            return list(value)
        case _:
            return value
