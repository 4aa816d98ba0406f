"""Converts frozen dataclasses to JSON documents and back, by their type hints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import msgspec

from autotune.core.candidate import Candidate, Choice
from autotune.core.files.json_text import read_json
from autotune.core.rows.table import Table

T = TypeVar("T")

DecodeError = msgspec.ValidationError
"""A ``ValueError``: a document does not have the expected structure; the message has the path of the field."""

_prepared: set[type] = set()
_prepare_lock = Lock()


def encode(value: object) -> Any:
    """Return ``value`` as types that ``json.dumps`` accepts: dataclasses become dictionaries, tuples stay tuples.

    Raises:
        TypeError: a value in it has no representation in JSON.
    """
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_encode_other)


def decode(kind: type[T], document: Any) -> T:
    """Return an instance of the dataclass ``kind`` from the output of :func:`encode`.

    Raises:
        DecodeError: a field is missing or has another type than its hint.
    """
    # msgspec caches a type's description before it is complete; a concurrent reader crashes with a segmentation fault
    # (seen with 0.22).
    if kind not in _prepared:
        with _prepare_lock:
            msgspec.json.Decoder(kind, dec_hook=_decode_other)
            _prepared.add(kind)
    return msgspec.convert(document, kind, str_keys=True, dec_hook=_decode_other)


def decoded(kind: type[T], file: Path) -> T | None:
    """Return the document in a file, or None if the file cannot be read or has another document."""
    try:
        return decode(kind, read_json(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


# msgspec does not support candidates, tables, and subclasses of str and float such as numpy.float64.
def _encode_other(value: object) -> Any:
    if isinstance(value, Table):
        return value.text
    if isinstance(value, Mapping):
        return dict(value)
    for kind in (str, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} has no representation in JSON")


def _decode_other(kind: type, document: Any) -> Any:
    if kind is Table:
        return Table.of_text(msgspec.convert(document, str))
    return Candidate(msgspec.convert(document, dict[str, Choice])) if kind is Candidate else document
