"""Edits keys in the text of a YAML configuration; other keys keep their text, and all comments are kept."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.core.nested import Key, mapping
from autotune.core.yaml_text import yaml_line
from autotune.errors import InputError
from autotune.inspection.yaml_file import Node, YamlFile, parsed, place, shown

Entry = tuple[Node, Node]

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_COMMENT = re.compile(r"#[^\r\n]*")
_HEADER_COMMENT = re.compile(r"[^\r\n]*?[ \t](#[^\r\n]*)")
_LINE_END = re.compile(r"\r\n|\r|\n")
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


@dataclass(frozen=True)
class Change:
    """A piece of the text, from ``start`` to before ``end``, and what takes its place."""

    start: int
    end: int
    new: str


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
    try:
        wanted = edited_values(file.values, edits)
        text = changed(file.text, _changes(file.text, file.root, edits))
    except _CannotEditError as error:
        why = f"this cannot be edited automatically: {shown(str(error))}"
        raise InputError(f"{place(file.path, error.line)}: {why}.", hint=_BY_HAND) from error
    try:
        values = parsed(text, file.path).values
    except InputError as error:
        why = f"the result would not be valid: {error.message}"
        raise InputError(f"{place(file.path)} cannot be edited automatically: {why}", hint=_BY_HAND) from error
    if not _alike(values, wanted):
        why = "an anchor, a merge or a text of several lines would change other values"
        raise InputError(f"{place(file.path)} cannot be edited automatically: {why}.", hint=_BY_HAND)
    return text


def edited_values(values: Mapping[str, Any], edits: Sequence[Edit]) -> dict[str, Any]:
    """Return the values of a configuration after edits, in the order of the text."""
    result, by_key = dict[str, Any](), _by_key(edits)
    for name in dict.fromkeys((*values, *by_key)):
        here, value = by_key.get(name, []), values.get(name)
        if here and len(here[0].path) == 1:
            new = here[0].write or {}
        elif any(edit.write for edit in here) or (here and isinstance(value, Mapping)):
            new = {name: edited_values(mapping(value), _inside(here))}
        else:
            new = {name: value} if name in values else {}
        for key in new.keys() & result.keys():
            raise _CannotEditError(f"{key!r} would be written, and is there already")
        result |= new
    return result


def changed(text: str, changes: Iterable[Change]) -> str:
    """Return a text with changes made that do not overlap; of several insertions at one place, the last comes first."""
    for change in sorted(changes, key=lambda change: (change.start, change.end), reverse=True):
        text = text[: change.start] + change.new + text[change.end :]
    return text


def unified_diff(before: str, after: str, name: str) -> str:
    """Return the difference of two texts of a file as ``diff -u`` prints it; empty when they are equal."""
    lines = difflib.unified_diff(_LINE.findall(before), _LINE.findall(after), shown(name), shown(name))
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _by_key(edits: Sequence[Edit]) -> dict[str, list[Edit]]:
    """Return edits by the first key on their paths; there is one where that is the whole path."""
    found: dict[str, list[Edit]] = {}
    for edit in edits:
        found.setdefault(edit.path[0], []).append(edit)
    for name, here in found.items():
        if len(here) > 1 and any(len(edit.path) == 1 for edit in here):
            raise ValueError(f"two edits of one key: {name}")
    return found


def _inside(edits: Sequence[Edit]) -> list[Edit]:
    """Return edits inside the value of a key, by their paths from there."""
    return [Edit(edit.path[1:], edit.write) for edit in edits]


@dataclass(frozen=True)
class _Touched:
    """The edits of one mapping: of its own entries, by their keys, inside their values, and of keys that it lacks."""

    replaced: Mapping[Node, Mapping[str, object]]
    inside: Mapping[Node, Sequence[Edit]]
    added: Mapping[str, object]


def _touched(node: Node, edits: Sequence[Edit]) -> _Touched:
    replaced, inside, added = dict[Node, Mapping[str, object]](), dict[Node, Sequence[Edit]](), list[Edit]()
    for name, here in _by_key(edits).items():
        entry, merged = node.own(name), node.entry(name)
        if entry is None and merged is not None:
            raise _CannotEditError(f"{name!r} comes from a merge", merged[0].line)
        if entry is None:
            added += here
        elif len(here[0].path) == 1:
            replaced[entry[0]] = here[0].write or {}
        elif entry[1].kind == "mapping":
            inside[entry[0]] = _inside(here)
        else:
            raise _CannotEditError(f"the value of {name!r} is not a mapping of its own", entry[0].line)
    return _Touched(replaced, inside, edited_values({}, added))


def _changes(text: str, node: Node, edits: Sequence[Edit]) -> Iterator[Change]:
    """Yield the changes of a mapping by edits, whose paths begin in it."""
    if node.flow:
        if any(comments_outside(text, node.scalars(), node.start, node.end)):
            raise _CannotEditError("a comment stands inside the braces", node.line)
        yield Change(node.start, node.end, _in_braces(text, node, edits))
        return
    touched = _touched(node, edits)
    # An inner mapping may end where this one does, and both then get their new keys at one place: the last of them
    # comes first in the text.
    if touched.added:
        yield _added(text, node, touched.added)
    dropped = [key for key, write in touched.replaced.items() if not write]
    emptied = dropped[-1] if len(dropped) == len(node.entries) and not touched.added else None
    for key, value in node.entries:
        if key in touched.replaced:
            yield _replaced(text, (key, value), touched.replaced[key], emptied=key is emptied)
        elif key in touched.inside:
            yield from _changes(text, value, touched.inside[key])


def _in_braces(text: str, node: Node, edits: Sequence[Edit]) -> str:
    """Return a mapping in braces after edits, with the other entries as they are written."""
    touched, parts = _touched(node, edits), list[str]()
    for key, value in node.entries:
        if key in touched.replaced:
            parts += _lines(touched.replaced[key])
        elif key in touched.inside:
            parts.append(text[key.start : value.start] + _in_braces(text, value, touched.inside[key]))
        else:
            parts.append(text[key.start : max(key.end, value.end)])
    start = text.index("{", node.start)
    return f"{text[node.start : start]}{{{', '.join([*parts, *_lines(touched.added)])}}}"


def _alike(one: Any, other: Any) -> bool:
    """Return whether two values are equal and of equal types: 1 is neither true nor 1.0."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    return type(one) is type(other) and (one == other or repr(one) == repr(other) == "nan")


class _CannotEditError(Exception):
    """An entry is written in a way that cannot be edited; the message has the reason.

    Attributes:
        line: the line of the entry, from 1; None where it is not known.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def _replaced(text: str, entry: Entry, write: Mapping[str, object], *, emptied: bool) -> Change:
    """Return the change that puts other keys, or none, in an entry's place; comments inside its value go above them.

    Args:
        emptied: whether nothing is left in the mapping, so that it has to be written as empty.
    """
    key, value = entry
    indent, end, newline = _indent(text, entry), _end(text, value), _newline(text, key.start)
    tail, line_end = _tail(text, entry, end)
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


def _added(text: str, node: Node, new: Mapping[str, object]) -> Change:
    """Return the change that adds keys behind the last entry of a mapping without braces."""
    first, last = node.entries[0], node.entries[-1]
    indent, end = _indent(text, first), last[1].end
    newline = _newline(text, first[0].start)
    lines = newline.join(f"{indent}{line}" for line in _lines(new))
    if end > 0 and text[end - 1] in "\r\n":  # behind a block scalar, whose end is the start of a line
        return Change(end, end, lines + newline)
    _, line_end = _tail(text, last, end)
    ending = _LINE_END.match(text, line_end)
    if ending is None:
        return Change(line_end, line_end, newline + lines)
    return Change(ending.end(), ending.end(), lines + newline)


def _indent(text: str, entry: Entry) -> str:
    before = text[: entry[0].start]
    start = max(before.rfind("\n"), before.rfind("\r")) + 1
    indent = before[start:]
    if indent.strip(" "):
        raise _CannotEditError(f"{indent.strip()!r} stands before the key", entry[0].line)
    return indent


def _end(text: str, value: Node) -> int:
    """Return where a value ends, without the empty lines after a block scalar."""
    last = value
    while last.children and not last.flow:
        last = last.children[-1]
    if last.style and last.style in "|>":
        return last.start + len(text[last.start : last.end].rstrip())
    return last.end


def _tail(text: str, entry: Entry, end: int) -> tuple[list[str], int]:
    """Return the comment after an entry, and where its line ends."""
    found = _LINE_END.search(text, end)
    line_end = found.start() if found else len(text)
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
    """Return the comments in a piece of the text around an entry, outside its scalars."""
    leaves = [leaf for node in entry for leaf in node.scalars()]
    headers = [match.span(1) for leaf in leaves if (match := header_comment(text, leaf)) is not None]
    spans = [match.span() for match in comments_outside(text, leaves, start, end)]
    return [text[slice(*span)] for span in sorted(headers + spans)]


def header_comment(text: str, leaf: Node) -> re.Match[str] | None:
    """Return the comment, as the first group, on the line of a block scalar's mark; None without one."""
    return _HEADER_COMMENT.match(text, leaf.start, leaf.end) if leaf.style and leaf.style in "|>" else None


def comments_outside(text: str, leaves: Iterable[Node], start: int, end: int) -> Iterator[re.Match[str]]:
    """Yield the comments in a piece of a text that are outside the scalars in it, in their order."""
    for stop, behind in [*((leaf.start, leaf.end) for leaf in leaves), (end, end)]:
        yield from _COMMENT.finditer(text, start, max(stop, start))
        start = behind
