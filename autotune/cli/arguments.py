"""Declares argparse options from the fields of the public functions' arguments, and converts parsed options back."""

from __future__ import annotations

import argparse
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import fields
from types import NoneType
from typing import Any, get_origin, get_type_hints

from autotune.app.arguments import AUTO, names, option
from autotune.app.public import OBJECTS, descriptions, kinds_of, placeholders, words_of
from autotune.errors import InputError
from autotune.trainers import DEFAULT

_GPU = "NAME|SIZE"
"""The placeholder of options for a GPU."""


class _Joined(argparse.Action):
    """Joins the values of an option that is given several times by commas, as in a list of GPUs."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        earlier = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, values if earlier is None else f"{earlier},{values}")


def add_options(
    parser: argparse.ArgumentParser,
    *kinds: type[Any],
    groups: Mapping[str, Iterable[str]] | None = None,
    optional: Iterable[str] = (),
) -> None:
    """Declare the fields of classes of arguments as options, each once; positional ones stay positional.

    Args:
        groups: argument names by title of the help's group; the group without names has all others.
        optional: names of arguments that are optional although they have no default.
    """
    homes: dict[str, argparse._ActionsContainer] = {}
    others: argparse._ActionsContainer = parser
    for title, own in (groups or {}).items():
        group = parser.add_argument_group(title)
        homes |= dict.fromkeys(own, group)
        others = others if own else group
    declared = set(OBJECTS)
    every = [each for kind in kinds for each in fields(kind)]
    positional = {each.name for each in every if not each.kw_only and not isinstance(each.default, str)}
    for kind in kinds:
        types, texts, words = get_type_hints(kind), descriptions(kind), placeholders(kind)
        for each in (each for each in fields(kind) if each.name not in declared):
            declared.add(each.name)
            name, default = each.name, each.default
            form = {"help": _help(texts, positional, name, default), **_settings(types[name], words.get(name), default)}
            if each.kw_only or isinstance(default, str):
                homes.get(name, others).add_argument(option(name, default), dest=name, **form)
            else:
                left_out = name in optional or default is None
                parser.add_argument(name, **{"nargs": "?" if left_out else None, **form, "metavar": name.upper()})


def _settings(annotation: object, placeholder: str | None, default: object) -> dict[str, Any]:
    """Return argparse's settings for an argument of a type."""
    kinds, words = set(kinds_of(annotation)), words_of(annotation)
    origins = {get_origin(kind) for kind in kinds}
    if bool in kinds:
        return {"action": "store_false" if default else "store_true"}
    if words and int not in kinds:
        return {"choices": words}
    form: dict[str, Any] = {"metavar": placeholder or "NAME"}
    if str not in kinds and origins & {Iterable, Mapping}:
        form |= {"action": "extend", "type": names} if Iterable in origins else {"action": "append"}
    elif words:
        form |= {"type": _number_or_auto, "metavar": f"N|{AUTO}"}
    elif kinds - {NoneType} == {int}:
        form |= {"type": int, "metavar": placeholder or "N"}
    elif kinds - {NoneType} == {float}:
        form |= {"type": float, "metavar": placeholder or "SHARE"}
    elif Sequence in origins:
        form["nargs"] = "*"
    elif placeholder == _GPU:
        form["action"] = _Joined
    return form


def _help(texts: Mapping[str, str], positional: Container[str], name: str, default: object) -> str:
    """Return the help text of an argument, ending with its default."""

    def spell(match: re.Match[str]) -> str:
        if match[1] in positional:
            return match[1].upper()
        return option(match[1]) if match[1] in texts else match[1]

    text = re.sub(r"``(.*?)``", spell, re.sub(r":\w+:`(.*?)`", r"\1", texts[name]))
    text, _, unset = text.removesuffix(".").partition(" None: ")
    if isinstance(default, int | float | str) and not isinstance(default, bool):
        unset = unset or str(default)
    if default is True:
        text = f"do not {text.replace('; otherwise', ':')}"
    default_text = f" (default: {unset.replace('the default one', DEFAULT)})" if unset else ""
    return f"{text.rstrip('.')}{default_text}".replace("%", "%%")


def _number_or_auto(text: str) -> int | str:
    if text != AUTO and not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {AUTO}")
    return text if text == AUTO else int(text)


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Declare --json; ``what`` describes the output."""
    parser.add_argument("--json", action="store_true", help=f"write {what} to stdout as JSON, and nothing else")


def options_of(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Return the arguments of the API's function, and whether JSON output is requested.

    Raises:
        InputError: --fix is malformed or contradicts itself.
    """
    options = vars(arguments)
    as_json: bool = options.pop("json", False)
    if "fix" in options:
        options["fix"] = fixes(options["fix"])
    return options, as_json


def fixes(texts: Iterable[str]) -> dict[str, str]:
    """Return choices by knob from texts such as ``packing=bfd``.

    Raises:
        InputError: a text is malformed, or two contradict each other.
    """
    fixed: dict[str, str] = {}
    for text in texts:
        knob, equals, choice = (part.strip() for part in text.partition("="))
        if not (knob and equals and choice):
            raise InputError(
                f"--fix {text!r} does not name a knob and a choice.", hint="Write for instance packing=bfd."
            )
        if fixed.setdefault(knob, choice) != choice:
            raise InputError(f"--fix {knob}={choice} contradicts --fix {knob}={fixed[knob]}.", hint="Give one of them.")
    return fixed


def trainer_names() -> str:
    """Return the values of --trainer, for the end of a command's help."""
    from autotune.trainers import trainers

    return f"--trainer takes:\n{indented(trainers())}\n"


def indented(words: Iterable[str]) -> str:
    """Return words as indented lines of a help."""
    return wrap_text(", ".join(words), "  ")


def wrap_text(text: str, indent: str = "") -> str:
    """Return text as lines of a help."""
    import textwrap

    return textwrap.fill(text, 80, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
