"""Converts frozen dataclasses to JSON documents and back, by their type hints."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any, TypeVar

import msgspec

from autotune.core.candidate import Candidate, Choice
from autotune.core.table import Table

T = TypeVar("T")

DecodeError = msgspec.ValidationError
"""A ``ValueError``: a document does not have the expected structure; the message names the place."""

_described: set[type] = set()
_describing = Lock()


def encode(value: object) -> Any:
    """Return ``value`` as types that ``json.dumps`` accepts: dataclasses become dictionaries, tuples remain tuples.

    Raises:
        TypeError: a value in it has no form in JSON.
    """
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_encoded)


def decode(kind: type[T], document: Any) -> T:
    """Return an instance of the dataclass ``kind`` from the output of :func:`encode`.

    Raises:
        DecodeError: a field is missing or has another type than its hint.
    """
    # msgspec caches a type's description before it is complete; a concurrent reader crashes with a segmentation fault
    # (seen with 0.22).
    if kind not in _described:
        with _describing:
            msgspec.json.Decoder(kind, dec_hook=_decoded)
            _described.add(kind)
    return msgspec.convert(document, kind, str_keys=True, dec_hook=_decoded)


# Conversions for candidates and tables, which are no dataclasses, and for subclasses of str and float, such as
# numpy.float64, which msgspec does not support.
def _encoded(value: object) -> Any:
    if isinstance(value, Table):
        return value.text
    if isinstance(value, Mapping):
        return dict(value)
    for kind in (str, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _decoded(kind: type, document: Any) -> Any:
    if kind is Table:
        return Table.of_text(msgspec.convert(document, str))
    return Candidate(msgspec.convert(document, dict[str, Choice])) if kind is Candidate else document
