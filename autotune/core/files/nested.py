"""Reads and writes values in nested mappings by their path of keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Key = tuple[str, ...]
"""A path of keys, such as ``("env", "PYTORCH_ALLOC_CONF")``."""


def lookup(values: object, key: Iterable[str]) -> tuple[object, ...]:
    """Return a tuple of the value at a path, or an empty tuple if there is none."""
    for name in key:
        if not isinstance(values, Mapping) or name not in values:
            return ()
        values = values[name]
    return (values,)


def mapping(value: object) -> Mapping[str, object]:
    """Return a value if it is a mapping, else an empty mapping."""
    return value if isinstance(value, Mapping) else {}


def set_or_remove(values: dict[str, object], key: Sequence[str], value: object) -> None:
    """Set the value at a path, or remove it if it is None; inner mappings are copied, not changed."""
    name, *rest = key
    if not rest:
        if value is None:
            values.pop(name, None)
        else:
            values[name] = value
    elif value is not None or isinstance(values.get(name), Mapping):
        inside = dict(mapping(values.get(name)))
        set_or_remove(inside, rest, value)
        values[name] = inside


def merge(values: dict[str, object], key: Sequence[str], value: object) -> None:
    """Set the value at a path, and create missing mappings; a mapping is merged into an existing one, key by key."""
    first, *names = key
    for name in reversed(names):
        value = {name: value}
    inside = values.get(first)
    if isinstance(value, Mapping) and isinstance(inside, dict):
        for name, each in value.items():
            merge(inside, (name,), each)
    else:
        values[first] = dict(value) if isinstance(value, Mapping) else value
