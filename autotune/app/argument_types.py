"""Checks values of arguments against the types that are declared for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from autotune.errors import InputError
from autotune.trainers import DEFAULT

_VALUES: Mapping[object, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    Iterable: "a list",
    Sequence: "a list",
    Mapping: "a dictionary",
    Callable: "a function",
}
"""Values of a type in words."""
_PRINTED = (NoneType, bool, int, float, str)
"""Types whose values a message has; another object may print a user's rows."""
_ROWS = "Write the rows to a file, as with `dataset.to_parquet('rows.parquet')`, and give its name."
_MODEL = "Write it with `model.save_pretrained(DIR)` and `tokenizer.save_pretrained(DIR)`, and give DIR."
_INSTEAD: Mapping[str, str] = {
    "model": _MODEL,
    "teacher": _MODEL,
    "dataset": _ROWS,
    "eval_dataset": _ROWS,
    "base": "Give its YAML file.",
    "trainer": f"Give its name, such as {DEFAULT!r}.",
}
"""What to give in place of an object, by the name of the argument."""


def check_type(name: str, value: object, annotation: object) -> None:
    """Check that the value of an argument is of the type that is declared for it.

    Raises:
        InputError: it is not.
    """
    kind = next((kind for kind in kinds_of(annotation) if _is_of(value, kind)), None)
    if kind is None:
        raise _refused(name, value, annotation)
    # A generator can be read only once.
    if get_origin(kind) in (Iterable, Sequence) and isinstance(value, Collection):
        for item in value:
            check_type(f"An item of {name}", item, get_args(kind)[0])


def kinds_of(annotation: object) -> tuple[object, ...]:
    """Return the types of a union, or the only one."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def words_of(annotation: object) -> tuple[str, ...]:
    """Return the words of a type that has a ``Literal``; none for another."""
    return next((get_args(kind) for kind in kinds_of(annotation) if get_origin(kind) is Literal), ())


def _is_of(value: object, kind: object) -> bool:
    if kind is Any:
        return True
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float)
    expected = get_origin(kind) or kind
    return isinstance(expected, type) and isinstance(value, expected)


def _refused(name: str, value: object, annotation: object) -> InputError:
    named = f"an object of the class {type(value).__name__}"
    if isinstance(value, type):
        named = f"the class {value.__name__}"
    shown = repr(value) if isinstance(value, _PRINTED) else named
    words: list[str] = []
    for kind in kinds_of(annotation):
        if get_origin(kind) is Literal:
            words += get_args(kind)
        elif kind is not NoneType:
            words.append(_VALUES.get(get_origin(kind) or kind) or f"an autotune.{getattr(kind, '__name__', kind)}")
    listed = " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
    instead = "" if isinstance(value, _PRINTED) else _INSTEAD.get(name, "")
    return InputError(f"{name} cannot be {shown}.", hint=f"It is {listed}. {instead}".strip())
