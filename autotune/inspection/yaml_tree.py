"""A YAML text as a tree of nodes that know their place in it, within limits that keep a hostile text harmless.

The nodes are made from the events of PyYAML, whose loader TRL uses, so that both see the same document.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

MAX_NODES = 10_000
"""Keys and values of a document, those behind aliases counted wherever they are referred to."""
MAX_DEPTH = 64
"""Collections inside one another; the loader recurses, so Python's own limit is not far above."""

_MAX_NUMBER = 400  # letters; PyYAML takes a number in base 60 (1:30:00) apart in quadratic time
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MERGE = "tag:yaml.org,2002:merge"
_RESOLVER: Any = Resolver()  # without types
_KNOWN_TAGS = frozenset(tag for tag in SafeConstructor.yaml_constructors if tag is not None) | {"!", _MERGE}


class TreeError(Exception):
    """A text that is no acceptable document.

    Attributes:
        line: where, from 1; None where it is nowhere in particular.
        hint: what to do about it, or an empty string.
    """

    def __init__(self, message: str, line: int | None = None, hint: str = "") -> None:
        super().__init__(message)
        self.line = line
        self.hint = hint


@dataclass(eq=False)
class Node:
    """A scalar, a collection or an alias in a text.

    Attributes:
        start: index of its first character; an anchor or a tag before it belongs to it.
        end: index behind its last character. A block collection ends where its last value does.
        line: line of ``start``, from 1.
        key: what a scalar means as a key.
        merge: whether a scalar is ``<<``.
        style: as PyYAML names it: ``|`` and ``>`` for block scalars, quotes, or an empty string.
        flow: whether a collection is written in brackets.
        entries: keys and values of a mapping, as written, merge keys included.
        items: values of a sequence.
        target: what an alias refers to.
        size: nodes that it consists of, aliases expanded.
    """

    kind: Literal["scalar", "mapping", "sequence", "alias"]
    start: int
    end: int
    line: int
    key: Hashable = None
    merge: bool = False
    style: str = ""
    flow: bool = False
    entries: list[tuple[Node, Node]] = field(default_factory=list)
    items: list[Node] = field(default_factory=list)
    target: Node | None = None
    size: int = 1

    def resolved(self) -> Node:
        """Return what an alias refers to, or else the node."""
        return self.target if self.target is not None else self

    def own(self, key: object) -> tuple[Node, Node] | None:
        """Return the entry with a key that a mapping itself has, not by a merge."""
        return next((entry for entry in self.entries if not entry[0].merge and _same(entry[0].key, key)), None)

    def entry(self, key: object) -> tuple[Node, Node] | None:
        """Return the entry with a key, also one that is merged into the mapping."""
        return self.own(key) or next((found for one in self.merged() if (found := one.entry(key)) is not None), None)

    def merged(self) -> Iterator[Node]:
        """Yield the mappings that are merged into this one, the one that prevails first."""
        for key, value in self.entries:
            if key.merge:
                sources = [value.resolved()] if value.resolved().kind == "mapping" else value.resolved().items
                yield from (source.resolved() for source in sources)

    def scalars(self) -> Iterator[Node]:
        """Yield the scalars and aliases in it, in the order of the text."""
        if self.kind == "mapping":
            for key, value in self.entries:
                yield from key.scalars()
                yield from value.scalars()
        elif self.kind == "sequence":
            for item in self.items:
                yield from item.scalars()
        else:
            yield self


def tree(text: str) -> Node | None:
    """Return the root of a text's only document, or None when it has none.

    Raises:
        TreeError: it is no YAML, breaks a limit, has a key twice, a tag that PyYAML's safe loader does not know, or an
            anchor that holds itself.
    """
    try:
        return _Builder().built(text)
    except yaml.reader.ReaderError as error:
        place = error.position if isinstance(error.position, int) else 0
        raise TreeError(
            f"the character {_code(error.character)} is not allowed",
            _line_at(text, place),
            "Take it out, or write it as an escape in double quotes.",
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = ": ".join(part for part in (error.context, error.problem) if part)
        raise TreeError(said, mark.line + 1 if mark is not None else None) from error
    except RecursionError as error:  # the scanner and the parser do not recurse, but nothing says so
        raise TreeError("it is nested too deeply") from error


class _Builder:
    """Puts nodes together while events come; stops at the first that breaks a limit."""

    def __init__(self) -> None:
        self._anchors: dict[str, Node] = {}
        self._open: list[tuple[Node, list[Node]]] = []
        self._names: list[str | None] = []
        self._root: Node | None = None
        self._count = 0

    def built(self, text: str) -> Node | None:
        documents = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise TreeError("a second document begins", _line(event), "A configuration is one document.")
            elif isinstance(event, (yaml.ScalarEvent, yaml.AliasEvent)):
                self._placed(self._leaf(event))
            elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
                self._begin(event)
            elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
                self._end(event)
        return self._root

    def _leaf(self, event: yaml.ScalarEvent | yaml.AliasEvent) -> Node:
        start, end, line = _start(event), _end(event), _line(event)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self._names:
                raise TreeError(f"the anchor {event.anchor!r} holds itself", line)
            if event.anchor not in self._anchors:
                raise TreeError(f"there is no anchor {event.anchor!r} before this", line)
            target = self._anchors[event.anchor]
            return Node("alias", start, end, line, key=target.key, target=target, size=target.size)
        _check_tag(event)
        tag = (
            event.tag
            if event.tag not in (None, "!")
            else _RESOLVER.resolve(yaml.ScalarNode, event.value, event.implicit)
        )
        merge = tag == _MERGE
        style = event.style if event.style is not None else ""
        key = event.value if merge else _meaning(tag, event.value, line)
        node = Node("scalar", start, end, line, key=key, merge=merge, style=style)
        self._named(event.anchor, node)
        return node

    def _begin(self, event: yaml.MappingStartEvent | yaml.SequenceStartEvent) -> None:
        _check_tag(event)
        if len(self._open) >= MAX_DEPTH:
            raise TreeError(f"more than {MAX_DEPTH} collections are inside one another", _line(event))
        kind: Literal["mapping", "sequence"] = "mapping" if isinstance(event, yaml.MappingStartEvent) else "sequence"
        node = Node(kind, _start(event), _end(event), _line(event), flow=bool(event.flow_style))
        self._open.append((node, []))
        self._names.append(event.anchor)

    def _end(self, event: yaml.MappingEndEvent | yaml.SequenceEndEvent) -> None:
        node, children = self._open.pop()
        name = self._names.pop()
        node.size = 1 + sum(child.size for child in children)
        if node.flow:
            node.end = _end(event)
        elif children:
            node.end = children[-1].end
        if node.kind == "mapping":
            node.entries = list(zip(children[::2], children[1::2], strict=True))
            _check_keys(node)
        else:
            node.items = children
        self._named(name, node)
        self._placed(node)

    def _named(self, anchor: str | None, node: Node) -> None:
        if anchor is not None:
            self._anchors[anchor] = node

    def _placed(self, node: Node) -> None:
        self._count += node.size if node.kind == "alias" else 1
        if self._count > MAX_NODES or node.size > MAX_NODES:
            raise TreeError(f"there are more than {MAX_NODES:,} keys and values, aliases expanded", node.line)
        if self._open:
            self._open[-1][1].append(node)
        else:
            self._root = node


def _check_tag(event: yaml.ScalarEvent | yaml.MappingStartEvent | yaml.SequenceStartEvent) -> None:
    if event.tag is not None and event.tag not in _KNOWN_TAGS:
        raise TreeError(
            f"the tag {event.tag!r} is not loaded", _line(event), "Write a plain value: TRL loads no objects from YAML."
        )


def _check_keys(mapping: Node) -> None:
    seen: dict[Hashable, Node] = {}
    for key, _ in mapping.entries:
        if key.resolved().kind != "scalar":
            raise TreeError("a key is a collection", key.line, "Keys are words.")
        same = (type(key.key), key.key)
        if same in seen:
            first = seen[same].line
            raise TreeError(
                f"{_cut(str(key.key))!r} is there twice; line {first} has it too",
                key.line,
                "Keep one; the last one counts.",
            )
        seen[same] = key


def _meaning(tag: str, value: str, line: int) -> Hashable:
    """Return what the safe loader makes of a scalar, as far as it makes anything that can be a key."""
    try:
        if tag in _NUMBERS and len(value) > _MAX_NUMBER:
            raise ValueError("too long")
        made = SafeConstructor().construct_object(yaml.ScalarNode(tag, value), deep=True)
    except yaml.MarkedYAMLError as error:
        raise TreeError(error.problem or "it cannot be loaded", line) from error
    except (ValueError, OverflowError, KeyError, IndexError, AttributeError) as error:
        name = tag.rpartition(":")[2]
        raise TreeError(f"{_cut(value)!r} cannot be read as {name}", line, "Quote it if it is text.") from error
    return made if isinstance(made, Hashable) else None


def _same(key: object, wanted: object) -> bool:
    return type(key) is type(wanted) and key == wanted


def _start(event: yaml.Event) -> int:
    assert event.start_mark is not None  # every event of a text has marks
    return int(event.start_mark.index)


def _end(event: yaml.Event) -> int:
    assert event.end_mark is not None
    return int(event.end_mark.index)


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None
    return int(event.start_mark.line) + 1


def _line_at(text: str, index: int) -> int:
    return text.count("\n", 0, index) + 1


def _cut(value: str) -> str:
    return value if len(value) <= 40 else f"{value[:40]}…"


def _code(character: object) -> str:
    number = character if isinstance(character, int) else ord(str(character)[:1] or "\0")
    return f"U+{number:04X}"
