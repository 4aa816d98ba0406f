"""Edits keys in the text of a YAML configuration and leaves every other byte, comments among them, as it is."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from autotune.core.nested import Key, put
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
    except _CannotEditError as error:
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
        text = (_FlowText if here.mapping.flow else _BlockText)(file.text, here.mapping)
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
            raise _CannotEditError(f"{name!r} comes from a merge", merged[0].line)
        if entry is None or depth == len(path) - 1:
            return mapping, path[depth:]
        if entry[1].kind != "mapping":
            raise _CannotEditError(f"the value of {name!r} is not a mapping of its own", entry[0].line)
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
            raise _CannotEditError(f"{name!r} would be written, and is there already", present[0].line)
        if names.count(name) > 1:
            raise _CannotEditError(f"{name!r} would be written twice", here.mapping.line)


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


class _CannotEditError(Exception):
    """An entry is written in a way that cannot be edited; the message has the reason.

    Attributes:
        line: the line of the entry, from 1.
    """

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True)
class Change:
    """A piece of the text, from ``start`` to before ``end``, and what takes its place."""

    start: int
    end: int
    new: str


@dataclass(frozen=True)
class _BlockText:
    """The entries of a mapping that has one on each line or more."""

    text: str
    mapping: Node

    def replaced(self, entry: Entry, write: Mapping[str, object]) -> Change:
        """Return the change that puts other keys in an entry's place; comments inside its value go above them."""
        key, value = entry
        indent, end = self._indent(entry), self._end(value)
        self._tail(entry, end)
        comments = [
            f"{comment}{self._newline(key.start)}{indent}" for comment in _comments(self.text, entry, key.start, end)
        ]
        lines = _lines(write)
        between = self.text[key.start : value.start]
        if not comments and next(iter(write)) == key.key and value.start < end and not _LINE_END.search(between):
            lines[0] = between + yaml_line(write[str(key.key)])
        joined = f"{self._newline(key.start)}{indent}".join(lines)
        return Change(key.start, end, "".join(comments) + joined)

    def dropped(self, entries: Sequence[Entry], *, last: bool) -> Iterator[Change]:
        """Yield the changes that drop entries; comments of theirs become lines.

        Args:
            last: whether nothing else is left in the mapping, so that it has to be written as empty.
        """
        for entry in entries:
            indent, end = self._indent(entry), self._end(entry[1])
            tail, line_end = self._tail(entry, end)
            lines = [*_comments(self.text, entry, entry[0].start, end), *tail]
            if last and entry is entries[-1]:
                lines.append("{}")
            ending = _LINE_END.match(self.text, line_end)
            newline = self._newline(entry[0].start)
            new = newline.join(f"{indent}{line}" for line in lines)
            if lines and ending:
                new += ending[0]
            yield Change(entry[0].start - len(indent), ending.end() if ending else line_end, new)

    def added(self, new: Mapping[str, object], *, alone: bool) -> Change:
        """Return the change that adds keys behind the last entry; nothing but them is left when ``alone``."""
        first, last = self.mapping.entries[0], self.mapping.entries[-1]
        indent, end = self._indent(first), last[1].end
        newline = self._newline(first[0].start)
        lines = [f"{indent}{line}" for line in _lines(new)]
        if end > 0 and self.text[end - 1] in "\r\n":  # behind a block scalar, whose end is the start of a line
            return Change(end, end, newline.join(lines) + newline)
        _, line_end = self._tail(last, end)
        ending = _LINE_END.match(self.text, line_end)
        if ending is None:
            return Change(line_end, line_end, newline + newline.join(lines))
        return Change(ending.end(), ending.end(), newline.join(lines) + newline)

    def _indent(self, entry: Entry) -> str:
        before = self.text[: entry[0].start]
        start = max(before.rfind("\n"), before.rfind("\r")) + 1
        indent = before[start:]
        if indent.strip(" "):
            raise _CannotEditError(f"{indent.strip()!r} stands before the key", entry[0].line)
        return indent

    def _end(self, value: Node) -> int:
        """Return where a value ends, without the empty lines after a block scalar."""
        last = value
        while last.children and not last.flow:
            last = last.children[-1]
        if last.style and last.style in "|>":
            return last.start + len(self.text[last.start : last.end].rstrip())
        return last.end

    def _tail(self, entry: Entry, end: int) -> tuple[list[str], int]:
        """Return the comment after an entry, and where its line ends."""
        found = _LINE_END.search(self.text, end)
        line_end = found.start() if found else len(self.text)
        tail = self.text[end:line_end].strip()
        if tail and not tail.startswith("#"):
            raise _CannotEditError(f"{tail!r} follows the value", entry[0].line)
        return [tail] if tail else [], line_end

    def _newline(self, index: int) -> str:
        found = _LINE_END.search(self.text, index) or _LINE_END.search(self.text)
        return found[0] if found else "\n"


@dataclass(frozen=True)
class _FlowText:
    """The entries of a mapping in braces."""

    text: str
    mapping: Node

    def replaced(self, entry: Entry, write: Mapping[str, object]) -> Change:
        """Return the change that puts other keys in an entry's place."""
        return self._without_comments(entry, entry[0].start, max(entry[0].end, entry[1].end), ", ".join(_lines(write)))

    def dropped(self, entries: Sequence[Entry], *, last: bool) -> Iterator[Change]:
        """Yield the changes that drop entries, each with one comma."""
        all_entries = self.mapping.entries
        for entry in entries:
            place = all_entries.index(entry)
            start, end = entry[0].start, max(entry[0].end, entry[1].end)
            if any(other not in entries for other in all_entries[place + 1 :]):
                end = all_entries[place + 1][0].start
            elif place > 0:
                before = all_entries[place - 1]
                start = max(before[0].end, before[1].end)
            yield self._without_comments(entry, start, end, "")

    def added(self, new: Mapping[str, object], *, alone: bool) -> Change:
        """Return the change that adds keys behind the last entry; nothing but them is left when ``alone``."""
        entries = self.mapping.entries
        place = max(entries[-1][0].end, entries[-1][1].end) if entries else self.mapping.end - 1
        return Change(place, place, ("" if alone or not entries else ", ") + ", ".join(_lines(new)))

    def _without_comments(self, entry: Entry, start: int, end: int, new: str) -> Change:
        """Return the change of a piece of the text around an entry; a comment in it would be lost."""
        if _comments(self.text, entry, start, end):
            raise _CannotEditError("a comment stands inside the braces", entry[0].line)
        return Change(start, end, new)


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
