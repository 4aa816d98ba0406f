"""A YAML text as a tree of nodes that know their place in it, within limits that keep a hostile text harmless.

The nodes are those that PyYAML composes, whose loader TRL uses, so that both see the same document.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml
from yaml.constructor import ConstructorError, SafeConstructor

MAX_NODES = 10_000
"""Keys and values of a document, those behind aliases counted wherever they are referred to."""
MAX_DEPTH = 64
"""Collections inside one another; the loader recurses, so Python's own limit is not far above."""

_MAX_NUMBER = 400  # letters; PyYAML takes a number in base 60 (1:30:00) apart in quadratic time
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MERGE = "tag:yaml.org,2002:merge"
_KNOWN_TAGS = frozenset(tag for tag in SafeConstructor.yaml_constructors if tag is not None) | {"!", _MERGE}


class TreeError(Exception):
    """A text that is no acceptable document.

    Attributes:
        line: where, from 1; None where it is nowhere in particular.
        hint: advice for the user, or an empty string.
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
        key: the value of a scalar as a key.
        merge: whether a scalar is ``<<``.
        style: as PyYAML names it: ``|`` and ``>`` for block scalars, quotes, or an empty string.
        flow: whether a collection is written in brackets.
        entries: keys and values of a mapping, as written, merge keys included.
        items: values of a sequence.
        target: the target of an alias.
        size: nodes in it, itself and the targets of aliases included.
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
        """Return the target of an alias, or else the node itself."""
        return self.target if self.target is not None else self

    def own(self, key: str) -> tuple[Node, Node] | None:
        """Return the entry with a key that a mapping itself has, not by a merge."""
        return next((entry for entry in self.entries if not entry[0].merge and entry[0].key == key), None)

    def entry(self, key: str) -> tuple[Node, Node] | None:
        """Return the entry with a key, also one that is merged into the mapping."""
        return self.own(key) or next((found for one in self.merged() if (found := one.entry(key)) is not None), None)

    def merged(self) -> Iterator[Node]:
        """Yield the mappings that are merged into this one, the one that prevails first."""
        for key, value in self.entries:
            if key.merge:
                sources = [value.resolved()] if value.resolved().kind == "mapping" else value.resolved().items
                yield from (source.resolved() for source in sources)

    @property
    def children(self) -> list[Node]:
        """The keys and values of a mapping, or the values of a sequence, in the order of the text."""
        return [node for entry in self.entries for node in entry] or self.items

    def scalars(self) -> Iterator[Node]:
        """Yield the scalars and aliases in it, in the order of the text."""
        if self.kind in ("scalar", "alias"):
            yield self
        for child in self.children:
            yield from child.scalars()


def tree(text: str) -> tuple[Node | None, object]:
    """Return the root of a text's only document, and its values as PyYAML loads them; None for both without one.

    Raises:
        TreeError: it is no YAML, breaks a limit, has a key twice, a tag that PyYAML's safe loader does not know, or an
            anchor that holds itself.
    """
    try:
        return _Loader(text).tree()
    except yaml.reader.ReaderError as error:
        raise TreeError(
            f"the character U+{error.character:04X} is not allowed",
            text.count("\n", 0, error.position) + 1,
            "Take it out, or write it as an escape in double quotes.",
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        # What cannot be constructed is named by its problem alone; its context is the kind of the value around it.
        context = None if isinstance(error, ConstructorError) else error.context
        message = ": ".join(part for part in (context, error.problem) if part)
        raise TreeError(message, mark.line + 1 if mark is not None else None) from error


class _Loader(yaml.SafeLoader):
    """Composes a document as the safe loader does; stops at the first node that breaks a limit.

    Its own nodes are made in the order of the text, each after those inside it, which it takes from the list.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._count = 0
        self._depth = 0
        self._made: list[Node] = []
        self._anchored: dict[str, Node] = {}

    def tree(self) -> tuple[Node | None, object]:
        """Return the root of the only document, and its values."""
        found = self.get_single_node()
        return (self._made[0], self.construct_object(found, deep=True)) if found is not None else (None, None)

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        found: Any
        before, made, line = self._count, len(self._made), event.start_mark.line + 1
        is_alias, is_collection = (isinstance(event, kind) for kind in (yaml.AliasEvent, yaml.CollectionStartEvent))
        if is_alias:
            found = super().compose_node(parent, index)
            target = self._anchored.get(event.anchor)
            if target is None:
                raise TreeError(f"the anchor {event.anchor!r} holds itself", line)
            self._count += target.size
            place = (event.start_mark.index, event.end_mark.index, line)
            node = Node("alias", *place, key=target.key, target=target)
        else:
            if event.tag is not None and event.tag not in _KNOWN_TAGS:
                hint = "Write a plain value: TRL loads no objects from YAML."
                raise TreeError(f"the tag {event.tag!r} is not loaded", line, hint)
            self._depth += is_collection
            if self._depth > MAX_DEPTH:
                raise TreeError(f"more than {MAX_DEPTH} collections are inside one another", line)
            self._count += 1
            found = super().compose_node(parent, index)
            self._depth -= is_collection
            node = self._node(found, self._made[made:])
            del self._made[made:]
            if event.anchor is not None:
                self._anchored[event.anchor] = node
        if self._count > MAX_NODES:
            raise TreeError(f"there are more than {MAX_NODES:,} keys and values, aliases expanded", line)
        node.size = self._count - before
        self._made.append(node)
        return found

    def _node(self, found: Any, inside: list[Node]) -> Node:
        """Return a node that is no alias, with the nodes inside it."""
        place = (found.start_mark.index, found.end_mark.index, found.start_mark.line + 1)
        if isinstance(found, yaml.ScalarNode):
            merge = found.tag == _MERGE
            key = found.value if merge else self._meaning(found)
            return Node("scalar", *place, key=key, merge=merge, style=found.style or "")
        if isinstance(found, yaml.SequenceNode):
            node = Node("sequence", *place, flow=found.flow_style, items=inside)
        else:
            entries = list(zip(inside[::2], inside[1::2], strict=True))
            _check_keys(entries)
            node = Node("mapping", *place, flow=found.flow_style, entries=entries)
        if node.children and not node.flow:
            # PyYAML's mark stands behind the empty lines that follow.
            node.end = node.children[-1].end
        return node

    def _meaning(self, found: yaml.ScalarNode) -> Hashable:
        """Return the safe loader's value of a scalar, if that can be a key."""
        try:
            if found.tag in _NUMBERS and len(found.value) > _MAX_NUMBER:
                raise ValueError("too long")
            made = self.construct_object(found, deep=True)
        except (ValueError, OverflowError, KeyError, IndexError, AttributeError) as error:
            name, line = found.tag.rpartition(":")[2], found.start_mark.line + 1
            message = f"{_cut(found.value)!r} cannot be read as {name}"
            raise TreeError(message, line, "Quote it if it is text.") from error
        return made if isinstance(made, Hashable) else None


def _check_keys(entries: list[tuple[Node, Node]]) -> None:
    seen: dict[Hashable, Node] = {}
    for key, _ in entries:
        if key.resolved().kind != "scalar":
            raise TreeError("a key is a collection", key.line, "Keys are words.")
        first = seen.setdefault((type(key.key), key.key), key)
        if first is not key:
            message = f"{_cut(str(key.key))!r} is there twice; line {first.line} has it too"
            raise TreeError(message, key.line, "Keep one; the last one counts.")


def _cut(value: str) -> str:
    return value if len(value) <= 40 else f"{value[:40]}…"
