"""Gives public functions the signatures of their classes of arguments, and checks the types of arguments."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from autotune.confidential import hidden_url, hidden_values
from autotune.core.events import Listener
from autotune.errors import InputError, suggestion
from autotune.trainers import DEFAULT

_Parameters = ParamSpec("_Parameters")
_Arguments = TypeVar("_Arguments")
_Result = TypeVar("_Result")
_DESCRIPTION = re.compile(r"^    (\w+)(?: \((\S+)\))?: (.*(?:\n {8}.*)*)", re.MULTILINE)
OBJECTS = frozenset({"listener", "config", "peft_config"})
"""Arguments of the Python API alone: without an option on the command line."""
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
"""Names of a type's values in messages."""
_SHOWN_TYPES = (NoneType, bool, int, float, str)
"""Types whose values appear in messages; other objects might print the user's data."""
_ROWS = "Write the rows to a file, as with `dataset.to_parquet('rows.parquet')`, and give its name."
_MODEL = "Write it with `model.save_pretrained(DIR)` and `tokenizer.save_pretrained(DIR)`, and give DIR."
_REMEDIES: Mapping[str, str] = {
    "model": _MODEL,
    "teacher": _MODEL,
    "dataset": _ROWS,
    "eval_dataset": _ROWS,
    "base": "Give its YAML file.",
    "reward_funcs": "Name a function by the path that imports it, such as 'my_rewards.length'.",
    "trainer": f"Give its name, such as {DEFAULT!r}.",
}
"""Hints for an argument whose value is an object of a library, by the argument's name."""


def logging_listener() -> Listener:
    """Return a listener that writes the progress of a run to the log of ``autotune``: at INFO, and notes as warnings.

    If that log does not show INFO, an interactive session and a terminal show the lines on standard error.
    """
    # Imported late: the help of a command needs no reports.
    from autotune.reporting.progress import PlainListener

    log = logging.getLogger("autotune")
    # Python and IPython have prompts where a user types.
    shows = not log.isEnabledFor(logging.INFO) and (hasattr(sys, "ps1") or sys.stderr.isatty())
    return PlainListener(partial(print, file=sys.stderr) if shows else log.info, log.warning)


@dataclass(frozen=True)
class Checked:
    """Arguments with checked types; None stands for the default unless the argument's type allows None."""

    def __post_init__(self) -> None:
        types = get_type_hints(type(self))
        for each in fields(self):
            value, declared = getattr(self, each.name), types[each.name]
            if isinstance(value, Iterator):
                # An iterator can be read only once.
                value = tuple(value)
                object.__setattr__(self, each.name, value)
            if value is None and each.default is not MISSING and NoneType not in kinds_of(declared):
                object.__setattr__(self, each.name, each.default)
            else:
                check_type(each.name, value, declared)


@dataclass(frozen=True, kw_only=True)
class Arguments(Checked):
    """Arguments of a public function.

    Each described field of a subclass is a parameter in Python and an option on the command line. The word in brackets,
    as in ``memory_budget (SIZE): ...``, is the option's placeholder in the help.

    Args:
        listener: receives the events of the run, as they happen; by default they are lines in the log of ``autotune``,
            at level INFO, notes as warnings. Where that log shows no INFO, a terminal and a notebook show the lines.
    """

    listener: Listener = field(default_factory=logging_listener)

    @property
    def settings(self) -> dict[str, object]:
        """The arguments that differ from their defaults, by name, without secrets: ``settings`` in ``result.json``."""
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in OBJECTS}
        # As `result.json` has them: paths as texts, sequences as lists.
        values: dict[str, object] = json.loads(json.dumps(given, default=_plain))
        if isinstance(storage := values.get("storage"), str):
            values["storage"] = hidden_url(storage)
        defaults = {each.name: each.default for each in fields(self)}
        values = hidden_values(values)
        return {name: value for name, value in values.items() if value not in (None, [], {}, defaults[name])}


def signature_from(
    kind: Callable[_Parameters, _Arguments],
) -> Callable[[Callable[[_Arguments], _Result]], Callable[_Parameters, _Result]]:
    """Return a decorator that gives a function the signature and the descriptions of its arguments' fields."""

    def decorate(function: Callable[[_Arguments], _Result]) -> Callable[_Parameters, _Result]:
        signature = inspect.signature(kind)

        @functools.wraps(function)
        def wrapper(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                # Python's own message, with the name of the function instead of that of the class of arguments.
                unknown = next((name for name in kwargs if name not in signature.parameters), "")
                hint = suggestion(unknown, signature.parameters).rstrip()
                raise TypeError(f"{function.__name__}() {error}{hint and '. '}{hint}") from None
            return function(kind(*args, **kwargs))

        listed = "\n".join(f"    {name}: {text}" for name, text in descriptions(kind).items())
        wrapper.__doc__ = f"{inspect.getdoc(function)}\n\nArgs:\n{listed}"
        returned = inspect.signature(function).return_annotation
        shown = signature.replace(return_annotation=returned)
        wrapper.__signature__ = shown  # type: ignore[attr-defined]  # inspect looks for it
        return wrapper

    return decorate


def descriptions(kind: object) -> dict[str, str]:
    """Return the descriptions of the arguments of a class, by name; those of a subclass override its parents'."""
    return {name: " ".join(text.split()) for name, _, text in _field_descriptions(kind)}


def placeholders(kind: object) -> dict[str, str]:
    """Return the placeholders of arguments in the help: the words in brackets before their descriptions."""
    return {name: word for name, word, _ in _field_descriptions(kind) if word}


def _field_descriptions(kind: object) -> Iterator[tuple[str, str, str]]:
    for each in reversed(inspect.getmro(kind)) if isinstance(kind, type) else ():
        yield from _DESCRIPTION.findall(inspect.cleandoc(each.__doc__ or "").partition("Args:\n")[2])


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)


def check_type(name: str, value: object, annotation: object) -> None:
    """Check the value of an argument against its declared type.

    Raises:
        InputError: it has another type.
    """
    kind = next((kind for kind in kinds_of(annotation) if _is_of(value, kind)), None)
    if kind is None:
        raise _type_error(name, value, annotation)
    if get_origin(kind) in (Iterable, Sequence, Mapping) and isinstance(value, Collection):
        part = "A key" if isinstance(value, Mapping) else "An item"
        for item in value:
            check_type(f"{part} of {name}", item, get_args(kind)[0])


def kinds_of(annotation: object) -> tuple[object, ...]:
    """Return the types of a union, or the only one."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def words_of(annotation: object) -> tuple[str, ...]:
    """Return the values of a type's ``Literal``; none for another type."""
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


def _type_error(name: str, value: object, annotation: object) -> InputError:
    named = f"an object of the class {type(value).__name__}"
    if isinstance(value, type):
        named = f"the class {value.__name__}"
    shown = repr(value) if isinstance(value, _SHOWN_TYPES) else named
    words: list[str] = []
    for kind in kinds_of(annotation):
        if get_origin(kind) is Literal:
            words += get_args(kind)
        elif kind is not NoneType:
            words.append(_VALUES.get(get_origin(kind) or kind) or f"an autotune.{getattr(kind, '__name__', kind)}")
    listed = " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
    instead = "" if isinstance(value, _SHOWN_TYPES) else _REMEDIES.get(name.rpartition(" ")[2], "")
    return InputError(f"{name} cannot be {shown}.", hint=f"It is {listed}. {instead}".strip())
