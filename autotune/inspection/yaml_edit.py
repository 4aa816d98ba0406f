"""Edits keys in the text of a YAML configuration and leaves every other byte, comments among them, as it is."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from autotune.core.nested import Key, put
from autotune.errors import InputError
from autotune.inspection.yaml_file import YamlFile, parsed, place, shown
from autotune.inspection.yaml_text import BlockText, CannotEditError, Change, Entry, FlowText
from autotune.inspection.yaml_tree import Node

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_BY_HAND = "Edit it by hand."


@dataclass(frozen=True)
class Edit:
    """A change of one key.

    Attributes:
        path: the key, and before it the keys of the mappings around it.
        write: keys and values that stand there afterwards; None or empty to drop the key.
    """

    path: Key
    write: Mapping[str, object] | None = None


def edited(file: YamlFile, edits: Sequence[Edit]) -> str:
    """Return a file's text with edits made.

    A key is replaced where it stands, in its indentation. Comments above and behind it stay; those inside its value
    and those of a key that is dropped become lines of their own. A key that is not there yet is added at the end of its
    mapping, and so is the mapping. What is written is read again and compared with what is wanted.

    Raises:
        InputError: an edit cannot be made in this text, because the key comes from a merge, its value is referred to
            elsewhere, or a key that would be written is there already. A person has to edit the file.
        ValueError: two edits are of the same key, or one is of a key inside the other.
    """
    _check_apart(edits)
    text = file.text
    try:
        changes = list(_changes(file, edits))
    except CannotEditError as error:
        why = f"this cannot be edited automatically: {shown(str(error))}"
        raise InputError(f"{place(file.path, error.line)}: {why}.", hint=_BY_HAND) from error
    for change in sorted(changes, key=lambda change: (change.start, change.end), reverse=True):
        text = text[: change.start] + change.new + text[change.end :]
    try:
        values = parsed(text, file.path).values
    except InputError as error:
        why = f"the result would not be valid: {error.message}"
        raise InputError(f"{place(file.path)} cannot be edited automatically: {why}", hint=_BY_HAND) from error
    if not _alike(values, edited_values(file.values, edits)):
        why = "an anchor, a merge or a text of several lines would change other values"
        raise InputError(f"{place(file.path)} cannot be edited automatically: {why}.", hint=_BY_HAND)
    return text


def edited_values(values: Mapping[str, Any], edits: Sequence[Edit]) -> dict[str, Any]:
    """Return the values of a configuration after edits."""
    result = dict(values)
    for edit in edits:
        if edit.path[-1] not in (edit.write or {}):
            put(result, edit.path, None)
    for edit in edits:
        _write(result, edit.path, edit.write or {})
    return result


def unified_diff(before: str, after: str, name: str) -> str:
    """Return the difference of two texts of a file as ``diff -u`` prints it; empty when they are equal."""
    lines = difflib.unified_diff(_LINE.findall(before), _LINE.findall(after), shown(name), shown(name))
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


@dataclass
class _Touched:
    """The edits of the entries of one mapping."""

    mapping: Node
    replaced: list[tuple[Entry, Mapping[str, object]]] = field(default_factory=list)
    dropped: list[Entry] = field(default_factory=list)
    added: dict[str, Any] = field(default_factory=dict)


def _changes(file: YamlFile, edits: Sequence[Edit]) -> Iterator[Change]:
    """Yield the changes of the text, none of which overlap."""
    touched: dict[int, _Touched] = {}
    for edit in edits:
        mapping, rest = _mapping_of(file, edit.path)
        entry = mapping.own(rest[0]) if len(rest) == 1 else None
        here = touched.setdefault(id(mapping), _Touched(mapping))
        if entry is None and edit.write:
            _write(here.added, rest, edit.write)
        elif entry is not None and edit.write:
            here.replaced.append((entry, edit.write))
        elif entry is not None:
            here.dropped.append(entry)
    # An inner mapping may end where the outer one does, and both then get their new keys at one place. What is inserted
    # there last comes first in the text, which has to be the inner mapping's.
    for here in sorted(touched.values(), key=lambda here: here.mapping.start):
        _check_new(here)
        text = (FlowText if here.mapping.flow else BlockText)(file.text, here.mapping)
        nothing_left = len(here.dropped) == len(here.mapping.entries)
        yield from (text.replaced(entry, write) for entry, write in here.replaced)
        yield from text.dropped(here.dropped, last=nothing_left and not here.added)
        if here.added:
            yield text.added(here.added, alone=nothing_left)


def _mapping_of(file: YamlFile, path: Key) -> tuple[Node, Key]:
    """Return the innermost mapping on a path, and the part of the path that is inside it."""
    mapping = file.root
    for depth, name in enumerate(path):
        entry, merged = mapping.own(name), mapping.entry(name)
        if entry is None and merged is not None:
            raise CannotEditError(f"{name!r} comes from a merge", merged[0].line)
        if entry is None or depth == len(path) - 1:
            return mapping, path[depth:]
        if entry[1].kind != "mapping":
            raise CannotEditError(f"the value of {name!r} is no mapping of its own", entry[0].line)
        mapping = entry[1]
    raise ValueError("an edit needs a path")


def _check_apart(edits: Sequence[Edit]) -> None:
    for one, other in combinations((edit.path for edit in edits), 2):
        shared = min(len(one), len(other))
        if one[:shared] == other[:shared]:
            raise ValueError(f"two edits of one key: {one} and {other}")


def _check_new(here: _Touched) -> None:
    """Check that no key would be in a mapping twice."""
    gone = [key.key for key, _ in (*here.dropped, *(entry for entry, _ in here.replaced))]
    names = [name for _, write in here.replaced for name in write] + list(here.added)
    for name in names:
        present = here.mapping.own(name)
        if present is not None and name not in gone:
            raise CannotEditError(f"{name!r} would be written, and is there already", present[0].line)
        if names.count(name) > 1:
            raise CannotEditError(f"{name!r} would be written twice", here.mapping.line)


def _write(values: dict[str, Any], path: Key, write: Mapping[str, object]) -> None:
    """Put keys beside the one that a path leads to, in copies of the mappings around it, or in new ones."""
    for name in path[:-1] if write else ():
        inside = values.get(name)
        values[name] = dict(inside) if isinstance(inside, Mapping) else {}
        values = values[name]
    values.update(write)


def _alike(one: Any, other: Any) -> bool:
    """Return whether two values are equal and of equal types: 1 is neither true nor 1.0."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return type(one) is type(other) and (one == other or repr(one) == repr(other) == "nan")
