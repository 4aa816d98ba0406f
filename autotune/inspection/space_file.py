"""Reads a space file: the choices to search and the recipes to try first, checked against the techniques."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from autotune.core.candidate import Choice
from autotune.errors import InputError
from autotune.inspection.yaml_file import Node, check_unique, excerpt, location, read_yaml
from autotune.space import SpaceFile
from autotune.techniques import find
from autotune.techniques.base import OFF, ON, Technique

# YAML 1.1 loads an unquoted on, off or null as a bool or None.
_YAML_WORDS: Mapping[object, str] = {True: ON, False: OFF, None: "none"}


def default_file(trainer: str) -> Path:
    """Return the path of autotune's own space file for a trainer."""
    package = Path(__file__).parents[1]
    shipped = package / "search_spaces" / f"{trainer}.yaml"
    return shipped if shipped.is_file() else package.parent / "search_spaces" / f"{trainer}.yaml"


def load(path: Path, trainer: str, techniques: Sequence[Technique]) -> SpaceFile:
    """Read a space file.

    Args:
        trainer: the required value of the key ``trainer``, if the file has it.
        techniques: the trainer's techniques.

    Raises:
        InputError: it cannot be read, is not YAML, repeats a key, or has an unknown technique or choice; the message
            has the line.
    """
    file = read_yaml(path)
    check_unique(file.root, path)
    sections = {key: (value, node) for key, value, node in _entries(path, file.values, file.root, "")}
    for key, (value, node) in sections.items():
        if key not in ("trainer", "techniques", "recipes"):
            raise _at(path, node, f"{excerpt(repr(key))} is none of trainer, techniques, recipes")
        if key == "trainer" and value != trainer:
            raise _at(path, node, f"it is for the trainer {excerpt(repr(value))}, and {trainer!r} was asked for")
    if "techniques" not in sections:
        raise InputError(f"The space file {path} has no key 'techniques'.", hint="It maps techniques to choices.")
    choices = {}
    for knob, value, node in _entries(path, *sections["techniques"], "a mapping from technique to choices"):
        listed = zip(value, node.resolved().items, strict=True) if isinstance(value, list) else [(value, node)]
        choices[knob] = tuple(_choice(path, knob, item, at, techniques) for item, at in listed)
    written, node = sections.get("recipes", ([], file.root))
    if not isinstance(written, list):
        raise _at(path, node, "recipes are a list of mappings from technique to choice")
    recipes = []
    for recipe, at in zip(written, node.resolved().items, strict=True) if written else ():
        entries = _entries(path, recipe, at, "a recipe, a mapping from technique to choice")
        recipes.append({knob: _choice(path, knob, value, item, techniques) for knob, value, item in entries})
    return SpaceFile(choices, tuple(recipes))


def _entries(path: Path, value: object, node: Node, wanted: str) -> Iterator[tuple[str, object, Node]]:
    """Yield the keys of a mapping with their values and the nodes of these."""
    if not isinstance(value, Mapping):
        raise _at(path, node, f"not {wanted}")
    for key, item in value.items():
        entry = node.resolved().entry(key)
        assert entry is not None
        yield str(key), item, entry[1]


def _choice(path: Path, knob: str, value: object, node: Node, techniques: Sequence[Technique]) -> Choice:
    if isinstance(value, Mapping | list):
        raise _at(path, node, f"a choice of {knob} is a word or a number")
    text = _YAML_WORDS[value] if value is None or isinstance(value, bool) else str(value)
    try:
        return find(knob, techniques).parse(text)
    except InputError as error:
        raise InputError(f"{location(path, node.line)}: {error.message}", hint=error.hint) from error


def _at(path: Path, node: Node, what: str) -> InputError:
    return InputError(f"{location(path, node.line)}: {what}.")
