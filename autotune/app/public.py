"""Makes a public function of a use case and the class of its arguments, whose docstring describes them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from autotune.confidential import hidden_url, hidden_values
from autotune.core.events import Listener, ignore
from autotune.errors import InputError

_Parameters = ParamSpec("_Parameters")
_Arguments = TypeVar("_Arguments")
_Result = TypeVar("_Result")
_DESCRIPTION = re.compile(r"^    (\w+)(?: \((\S+)\))?: (.*(?:\n {8}.*)*)", re.MULTILINE)


class Checked:
    """Arguments whose words are checked: those of a field with a ``Literal``, such as ``auto``, ``cuda`` or ``cpu``."""

    def __post_init__(self) -> None:
        for name, annotation in get_type_hints(type(self)).items():
            value, words = getattr(self, name), words_of(annotation)
            types = tuple(kind for kind in kinds_of(annotation) if isinstance(kind, type))
            if words and value not in words and not isinstance(value, types):
                *others, last = (*(["a number"] if int in types else []), *words)
                raise InputError(f"{name} cannot be {value!r}.", hint=f"It is {', '.join(others)} or {last}.")


@dataclass(frozen=True, kw_only=True)
class Arguments(Checked):
    """Arguments of a public function.

    A field of a subclass with its description is a parameter in Python and an option on the command line. There, a word
    in brackets, as in ``memory_budget (SIZE): ...``, stands for its value in the help.

    Args:
        listener: receives the events of the run, as they happen.
    """

    listener: Listener = ignore

    @property
    def settings(self) -> dict[str, object]:
        """The arguments that differ from their defaults, by name, without secrets.

        ``settings`` in ``result.json`` and in a plan's document have it, and the command that repeats a run is made of
        it.
        """
        values = {each.name: as_json(getattr(self, each.name)) for each in fields(self) if each.name != "listener"}
        if isinstance(storage := values.get("storage"), str):
            values["storage"] = hidden_url(storage)
        defaults = {each.name: each.default for each in fields(self)}
        values = hidden_values(values)
        return {name: value for name, value in values.items() if value not in (None, [], {}, defaults[name])}


def kinds_of(annotation: object) -> frozenset[object]:
    """Return the types of a union, or the only one."""
    return frozenset(get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,))


def words_of(annotation: object) -> tuple[str, ...]:
    """Return the words of a type that has a ``Literal``; none for another."""
    return next((get_args(kind) for kind in kinds_of(annotation) if get_origin(kind) is Literal), ())


def taking(
    kind: Callable[_Parameters, _Arguments],
) -> Callable[[Callable[[_Arguments], _Result]], Callable[_Parameters, _Result]]:
    """Return a decorator that gives a function of arguments the signature and the descriptions of these arguments."""

    def taken(function: Callable[[_Arguments], _Result]) -> Callable[_Parameters, _Result]:
        signature = inspect.signature(kind)

        @functools.wraps(function)
        def called(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            # Its error names no class that the caller never heard of.
            signature.bind(*args, **kwargs)
            return function(kind(*args, **kwargs))

        listed = "\n".join(f"    {name}: {text}" for name, text in descriptions(kind).items())
        called.__doc__ = f"{inspect.getdoc(function)}\n\nArgs:\n{listed}"
        returned = inspect.signature(function).return_annotation
        shown = signature.replace(return_annotation=returned)
        called.__signature__ = shown  # type: ignore[attr-defined]  # inspect looks for it
        return called

    return taken


def descriptions(kind: object) -> dict[str, str]:
    """Return the descriptions of the arguments of a class, by name; those of a subclass override its parents'."""
    return {name: " ".join(text.split()) for name, _, text in _described(kind)}


def placeholders(kind: object) -> dict[str, str]:
    """Return the names of the values of arguments in a help, which are in brackets before a description."""
    return {name: word for name, word, _ in _described(kind) if word}


def _described(kind: object) -> Iterator[tuple[str, str, str]]:
    for each in reversed(inspect.getmro(kind)) if isinstance(kind, type) else ():
        yield from _DESCRIPTION.findall(inspect.cleandoc(each.__doc__ or "").partition("Args:\n")[2])


def as_json(value: object) -> object:
    """Return what JSON has for the value of an argument: texts for paths, lists and dictionaries."""
    match value:
        case Path():
            return str(value)
        case Mapping():
            return dict(value)
        case list() | tuple() | set() | frozenset():
            return list(value)
        case _:
            return value
