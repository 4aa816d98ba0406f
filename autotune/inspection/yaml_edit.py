"""Edits keys in the text of a YAML configuration, and keeps all comments and the text of the other keys."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.core.files.nested import Key, mapping
from autotune.core.files.yaml_text import yaml_line
from autotune.errors import InputError
from autotune.inspection.yaml_file import Node, YamlFile, excerpt, location, parse_yaml

Entry = tuple[Node, Node]

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_COMMENT = re.compile(r"#[^\r\n]*")
_HEADER_COMMENT = re.compile(r"[^\r\n]*?[ \t](#[^\r\n]*)")
_LINE_END = re.compile(r"\r\n|\r|\n")
_BY_HAND = "Edit it by hand."


@dataclass(frozen=True)
class Edit:
    """A change of one key of a configuration.

    Attributes:
        path: the keys of the mappings around it, then the key.
        write: keys and values that replace it; None or empty removes the key.
    """

    path: Key
    write: Mapping[str, object] | None = None


@dataclass(frozen=True)
class Change:
    """A replacement of the text from ``start`` to before ``end``."""

    start: int
    end: int
    new: str


def apply_edits(file: YamlFile, edits: Sequence[Edit]) -> str:
    """Return a file's text after edits.

    A key is replaced in place, with its indentation. Comments above it and after it stay; comments inside its value,
    and those of a removed key, become lines of their own. A new key, or a new mapping, is added at the end of the
    mapping around it. A mapping in braces is written anew, and without them if it is the whole document. The result is
    parsed again and compared with the edited values.

    Raises:
        InputError: the text cannot be edited: the key comes from a merge, an alias refers to its value, or a new key
            exists already.
        ValueError: two edits are of the same key, or one is of a key inside the other.
    """
    try:
        wanted = edited_values(file.values, edits)
        if _equal_with_types(file.values, wanted):
            return file.text
        text = apply_changes(file.text, _changes(file.text, file.root, edits, wanted))
    except _CannotEditError as error:
        why = f"this cannot be edited automatically: {excerpt(str(error))}"
        raise InputError(f"{location(file.path, error.line)}: {why}.", hint=_BY_HAND) from error
    try:
        values = parse_yaml(text, file.path).values
    except InputError as error:
        why = f"the result would not be valid: {error.message}"
        raise InputError(f"{location(file.path)} cannot be edited automatically: {why}", hint=_BY_HAND) from error
    if not _equal_with_types(values, wanted):
        why = "a repeated key, an anchor, a merge or a text of several lines would change other values"
        raise InputError(f"{location(file.path)} cannot be edited automatically: {why}.", hint=_BY_HAND)
    return text


def edited_values(values: Mapping[str, Any], edits: Sequence[Edit]) -> dict[str, Any]:
    """Return the values of a configuration after edits, in the order of the text."""
    result, by_key = dict[str, Any](), _by_key(edits)
    for name in dict.fromkeys((*values, *by_key)):
        here, value = by_key.get(name, []), values.get(name)
        if here and len(here[0].path) == 1:
            new = here[0].write or {}
        elif any(edit.write for edit in here) or (here and isinstance(value, Mapping)):
            new = {name: edited_values(mapping(value), _relative(here))}
        else:
            new = {name: value} if name in values else {}
        for key in new.keys() & result.keys():
            raise _CannotEditError(f"{key!r} would be written, and is there already")
        result |= new
    return result


def apply_changes(text: str, changes: Iterable[Change]) -> str:
    """Return a text after changes that do not overlap; of several insertions at one index, the last comes first."""
    for change in sorted(changes, key=lambda change: (change.start, change.end), reverse=True):
        text = text[: change.start] + change.new + text[change.end :]
    return text


def unified_diff(before: str, after: str, name: str, written: str | None = None) -> str:
    """Return the difference of two texts of a file as ``diff -u`` prints it; empty if they are equal.

    Args:
        written: name of the file with the second text. None: the same.
    """
    names = excerpt(name), excerpt(name if written is None else written)
    lines = difflib.unified_diff(_LINE.findall(before), _LINE.findall(after), *names)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _by_key(edits: Sequence[Edit]) -> dict[str, list[Edit]]:
    """Return the edits by the first key of their paths; a key that is edited as a whole has one."""
    groups: dict[str, list[Edit]] = {}
    for edit in edits:
        groups.setdefault(edit.path[0], []).append(edit)
    for name, group in groups.items():
        if len(group) > 1 and any(len(edit.path) == 1 for edit in group):
            raise ValueError(f"two edits of one key: {name}")
    return groups


def _relative(edits: Sequence[Edit]) -> list[Edit]:
    """Return edits inside a value with their paths relative to it."""
    return [Edit(edit.path[1:], edit.write) for edit in edits]


def _changes(text: str, node: Node, edits: Sequence[Edit], wanted: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the changes of a mapping by edits, whose paths begin in it.

    Args:
        node: the root, or a mapping without braces.
        wanted: its values after the edits.
    """
    if node.flow:
        comments = [match[0] for match in comments_outside(text, node.scalars(), node.start, node.end)]
        yield Change(node.start, node.end, _newline(text, node.start).join([*comments, *(_lines(wanted) or ["{}"])]))
        return
    replaced, added, inside = dict[Node, Mapping[str, object]](), list[Edit](), list[Change]()
    for name, here in _by_key(edits).items():
        entry, merged = node.own_entry(name), node.entry(name)
        if entry is None and merged is not None:
            raise _CannotEditError(f"{name!r} comes from a merge", merged[0].line)
        if entry is None:
            added += here
        elif len(here[0].path) == 1:
            replaced[entry[0]] = here[0].write or {}
        elif entry[1].kind != "mapping":
            raise _CannotEditError(f"the value of {name!r} is not a mapping of its own", entry[0].line)
        elif entry[1].flow:
            replaced[entry[0]] = {name: wanted[name]}
        else:
            inside += _changes(text, entry[1], _relative(here), wanted[name])
    # If the last value is a mapping, new keys of both are inserted at one index; `apply_changes` puts the last
    # insertion first.
    if added:
        yield _addition(text, node, edited_values({}, added))
    yield from _replacements(text, node, replaced, empties=not added)
    yield from inside


def _replacements(
    text: str, node: Node, replaced: Mapping[Node, Mapping[str, object]], *, empties: bool
) -> Iterator[Change]:
    """Yield the changes that replace entries by other keys.

    Args:
        replaced: what replaces an entry, by the node of its key.
        empties: whether the mapping becomes empty if no key replaces any entry.
    """
    dropped = [key for key, write in replaced.items() if not write]
    emptied = dropped[-1] if empties and len(dropped) == len(node.entries) else None
    for key, value in node.entries:
        if key in replaced:
            yield _replacement(text, (key, value), replaced[key], emptied=key is emptied)


def _equal_with_types(one: Any, other: Any) -> bool:
    """Return whether two values are equal and of equal types: 1 is neither true nor 1.0."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal_with_types(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal_with_types, one, other))
    return type(one) is type(other) and (one == other or repr(one) == repr(other) == "nan")


class _CannotEditError(Exception):
    """An entry cannot be edited; the message has the reason.

    Attributes:
        line: the line of the entry, from 1; None if it is not known.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def _replacement(text: str, entry: Entry, write: Mapping[str, object], *, emptied: bool) -> Change:
    """Return the change that replaces an entry by other keys, or none; comments inside its value move above them.

    Args:
        emptied: whether the mapping becomes empty, so that ``{}`` has to be written.
    """
    key, value = entry
    indent, end, newline = _indent(text, entry), _value_end(text, value), _newline(text, key.start)
    tail, line_end = _trailing_comment(text, entry, end)
    comments, lines = _comments(text, entry, key.start, end), _lines(write)
    if lines:
        between = text[key.start : value.start]
        if not comments and next(iter(write)) == key.key and value.start < end and not _LINE_END.search(between):
            lines[0] = between + yaml_line(write[str(key.key)])
        return Change(key.start, end, f"{newline}{indent}".join([*comments, *lines]))
    left = [f"{indent}{line}" for line in (*comments, *tail, *(("{}",) if emptied else ()))]
    ending = _LINE_END.match(text, line_end)
    new = newline.join(left) + (ending[0] if left and ending else "")
    return Change(key.start - len(indent), ending.end() if ending else line_end, new)


def _addition(text: str, node: Node, new: Mapping[str, object]) -> Change:
    """Return the change that adds keys after the last entry of a block mapping."""
    first, last = node.entries[0], node.entries[-1]
    indent, end = _indent(text, first), last[1].end
    newline = _newline(text, first[0].start)
    lines = newline.join(f"{indent}{line}" for line in _lines(new))
    if end > 0 and text[end - 1] in "\r\n":  # a block scalar ends at the start of a line
        return Change(end, end, lines + newline)
    _, line_end = _trailing_comment(text, last, end)
    ending = _LINE_END.match(text, line_end)
    if ending is None:
        return Change(line_end, line_end, newline + lines)
    return Change(ending.end(), ending.end(), lines + newline)


def _indent(text: str, entry: Entry) -> str:
    before = text[: entry[0].start]
    start = max(before.rfind("\n"), before.rfind("\r")) + 1
    indent = before[start:]
    if indent.strip(" "):
        raise _CannotEditError(f"{indent.strip()!r} is before the key", entry[0].line)
    return indent


def _value_end(text: str, value: Node) -> int:
    """Return the end index of a value, without the empty lines after a block scalar."""
    last = value
    while last.children and not last.flow:
        last = last.children[-1]
    if last.style and last.style in "|>":
        return last.start + len(text[last.start : last.end].rstrip())
    return last.end


def _trailing_comment(text: str, entry: Entry, end: int) -> tuple[list[str], int]:
    """Return the comment after an entry, if any, and the index of the end of its line."""
    match = _LINE_END.search(text, end)
    line_end = match.start() if match else len(text)
    tail = text[end:line_end].strip()
    if tail and not tail.startswith("#"):
        raise _CannotEditError(f"{tail!r} follows the value", entry[0].line)
    return [tail] if tail else [], line_end


def _newline(text: str, index: int) -> str:
    found = _LINE_END.search(text, index) or _LINE_END.search(text)
    return found[0] if found else "\n"


def _lines(write: Mapping[str, object]) -> list[str]:
    return [f"{yaml_line(key)}: {yaml_line(value)}" for key, value in write.items()]


def _comments(text: str, entry: Entry, start: int, end: int) -> list[str]:
    """Return the comments from ``start`` to ``end`` around an entry, outside its scalars."""
    leaves = [leaf for node in entry for leaf in node.scalars()]
    headers = [match.span(1) for leaf in leaves if (match := header_comment(text, leaf)) is not None]
    spans = [match.span() for match in comments_outside(text, leaves, start, end)]
    return [text[slice(*span)] for span in sorted(headers + spans)]


def header_comment(text: str, leaf: Node) -> re.Match[str] | None:
    """Match the comment after the ``|`` or ``>`` of a block scalar, as group 1; None without one."""
    return _HEADER_COMMENT.match(text, leaf.start, leaf.end) if leaf.style and leaf.style in "|>" else None


def comments_outside(text: str, leaves: Iterable[Node], start: int, end: int) -> Iterator[re.Match[str]]:
    """Yield the comments from ``start`` to ``end`` outside the given scalars, in their order."""
    for stop, behind in [*((leaf.start, leaf.end) for leaf in leaves), (end, end)]:
        yield from _COMMENT.finditer(text, start, max(stop, start))
        start = behind
