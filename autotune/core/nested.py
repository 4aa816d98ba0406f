"""Values inside mappings of mappings, by the keys that lead to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

Key = tuple[str, ...]
"""A key, and before it the keys of the mappings around it, such as ``("env", "PYTORCH_ALLOC_CONF")``."""


def at(values: object, key: Iterable[str]) -> tuple[object, ...]:
    """Return the value of a key alone, or nothing where the key is not there."""
    for name in key:
        if not isinstance(values, Mapping) or name not in values:
            return ()
        values = values[name]
    return (values,)


def mapping(value: object) -> Mapping[str, object]:
    """Return a value that is a mapping, or else an empty one."""
    return value if isinstance(value, Mapping) else {}


def put(values: dict[str, object], key: Sequence[str], value: object) -> None:
    """Set a value in a mapping of mappings, or drop it if it is None; mappings inside are replaced by new ones."""
    name, *rest = key
    if not rest:
        if value is None:
            values.pop(name, None)
        else:
            values[name] = value
    elif value is not None or isinstance(values.get(name), Mapping):
        inside = dict(mapping(values.get(name)))
        put(inside, rest, value)
        values[name] = inside


def merge(values: dict[str, object], key: Sequence[str], value: object) -> None:
    """Set a value in a mapping of mappings, which are made where there are none.

    A mapping is put into one that is there already, key by key.
    """
    first, *names = key
    for name in reversed(names):
        value = {name: value}
    inside = values.get(first)
    if isinstance(value, Mapping) and isinstance(inside, dict):
        for name, each in value.items():
            merge(inside, (name,), each)
    else:
        values[first] = dict(value) if isinstance(value, Mapping) else value
