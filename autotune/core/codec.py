"""Converts frozen dataclasses to JSON documents and back, by their type hints."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from autotune.core.candidate import Candidate
from autotune.core.table import Table

T = TypeVar("T")


_PLAIN = (int, str)
# What `json.dumps` takes as it is. Enumerations that are strings or numbers too are of their own type.
_AS_THEY_ARE = frozenset({int, float, str, bool, type(None)})


class DecodeError(ValueError):
    """A document does not have the expected structure; the message names the place."""


def _table(text: str) -> Table:
    try:
        return Table.of_text(text)
    except ValueError as error:
        raise DecodeError(str(error)) from error


# Classes with a form of their own: how they are made of it, and of which type it is.
_OWN: Mapping[Any, tuple[Callable[[Any], Any], type[Any]]] = {
    Candidate: (Candidate, Mapping),
    Table: (_table, str),
}


def encode(value: object) -> Any:
    """Return ``value`` as what ``json.dumps`` takes: dataclasses and mappings become objects, tuples become arrays."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Table):
        return value.text
    if isinstance(value, Mapping):
        # Counts by length are sorted, so that a document does not depend on the order of the rows.
        counts = all(isinstance(key, int) for key in value)
        return {str(key): encode(value[key]) for key in (sorted(value) if counts else value)}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value) if isinstance(value, (set, frozenset)) else value
        # A fast path: most of a trace's document is long arrays of numbers and names.
        return list(items) if _AS_THEY_ARE.issuperset(map(type, items)) else [encode(item) for item in items]
    return value


def decode(kind: type[T], document: Any) -> T:
    """Return an instance of the dataclass ``kind`` from what :func:`encode` made of it.

    Raises:
        DecodeError: a field is missing or has another type than its hint.
    """
    try:
        return cast(T, _decode(kind, document, kind.__name__))
    except DecodeError:
        raise
    except (ValueError, TypeError, OverflowError) as error:  # a key that is no number, or what a class refuses
        raise DecodeError(f"{kind.__name__} cannot be made of it: {error}") from error


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _decode(hint: Any, document: Any, place: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return document
    if origin in (Union, types.UnionType):
        return _decode_union(args, document, place)
    if origin is Literal:
        return _check(document in args, document, place)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(cast(type, hint), document, place)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(_check(document in [member.value for member in hint], document, place))
    if hint in _OWN:
        of, kind = _OWN[hint]
        return of(_check(isinstance(document, kind), document, place))
    if origin in (Mapping, dict):
        _check(isinstance(document, Mapping), document, place)
        key_hint, value_hint = args
        keys = int if key_hint is int else str
        return {keys(key): _decode(value_hint, item, f"{place}[{key}]") for key, item in document.items()}
    if origin in (tuple, list, Sequence, frozenset):
        items = _decode_items(origin, args, document, place)
        return origin(items) if origin in (tuple, frozenset) else items
    if hint is float:
        return float(_check(isinstance(document, (int, float)), document, place))
    return _check(isinstance(document, hint), document, place)


def _decode_items(origin: Any, args: tuple[Any, ...], document: Any, place: str) -> list[Any]:
    items: list[Any] = _check(isinstance(document, list), document, place)
    varied = origin is tuple and args[-1] is not Ellipsis
    if not varied and args[0] in _PLAIN and all(type(item) is args[0] for item in items):
        # A fast path: most of a trace's document is long arrays of numbers and names.
        return items
    hints = args if varied else (args[0],) * len(items)
    _check(len(hints) == len(items), document, place)
    return [_decode(hint, item, place) for hint, item in zip(hints, items, strict=True)]


def _decode_union(args: tuple[Any, ...], document: Any, place: str) -> Any:
    if document is None and type(None) in args:
        return None
    for option in args:
        if option is type(None):
            continue
        try:
            return _decode(option, document, place)
        except DecodeError:
            continue
    return _check(False, document, place)


def _decode_dataclass(kind: type, document: Any, place: str) -> Any:
    _check(isinstance(document, Mapping), document, place)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    required = {
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    missing = required - document.keys()
    if missing:
        raise DecodeError(f"{place} lacks {', '.join(sorted(missing))}")
    known = {name: item for name, item in document.items() if name in fields}
    return kind(**{name: _decode(_hints(kind)[name], item, f"{place}.{name}") for name, item in known.items()})


def _check(holds: bool, document: Any, place: str) -> Any:
    if not holds:
        raise DecodeError(f"{place} cannot be {document!r}")
    return document
