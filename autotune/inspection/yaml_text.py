"""Locates an entry of a YAML mapping in the text, and returns the text that replaces, drops or adds entries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.core.yaml_text import yaml_line
from autotune.inspection.yaml_tree import Node

Entry = tuple[Node, Node]

_COMMENT = re.compile(r"#[^\r\n]*")
_HEADER_COMMENT = re.compile(r"[^\r\n]*?[ \t](#[^\r\n]*)")
_LINE_END = re.compile(r"\r\n|\r|\n")


class CannotEditError(Exception):
    """An entry stands in the text in a way that cannot be edited; the message has the reason.

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
class BlockText:
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
            raise CannotEditError(f"{indent.strip()!r} stands before the key", entry[0].line)
        return indent

    def _end(self, value: Node) -> int:
        """Return where a value ends, without the empty lines behind a block scalar."""
        last = value
        while last.children and not last.flow:
            last = last.children[-1]
        if last.style and last.style in "|>":
            return last.start + len(self.text[last.start : last.end].rstrip())
        return last.end

    def _tail(self, entry: Entry, end: int) -> tuple[list[str], int]:
        """Return the comment behind an entry, and where its line ends."""
        found = _LINE_END.search(self.text, end)
        line_end = found.start() if found else len(self.text)
        tail = self.text[end:line_end].strip()
        if tail and not tail.startswith("#"):
            raise CannotEditError(f"{tail!r} stands behind the value", entry[0].line)
        return [tail] if tail else [], line_end

    def _newline(self, index: int) -> str:
        found = _LINE_END.search(self.text, index) or _LINE_END.search(self.text)
        return found[0] if found else "\n"


@dataclass(frozen=True)
class FlowText:
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
            raise CannotEditError("a comment stands inside the braces", entry[0].line)
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
