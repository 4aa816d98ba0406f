"""Reads a TRL configuration in YAML safely: its values as TRL sees them, and the place of every key in the text.

A text is read within limits that keep a hostile one harmless, and as a tree of the nodes that PyYAML composes, whose
loader TRL uses, so that both see the same document.
"""

from __future__ import annotations

import stat
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from yaml.constructor import ConstructorError, SafeConstructor

from autotune.core.json_text import MAX_DEPTH
from autotune.core.text import printable
from autotune.errors import InputError

MAX_BYTES = 128 * 1024
"""PyYAML reads up to 15 microseconds a byte; configurations have a few thousand bytes."""
MAX_NODES = 10_000
"""Keys and values of a document, those of aliases counted at every reference."""

_MAX_NUMBER = 400  # letters; PyYAML takes a number in base 60 (1:30:00) apart in quadratic time
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MERGE = "tag:yaml.org,2002:merge"
_KNOWN_TAGS = frozenset(tag for tag in SafeConstructor.yaml_constructors if tag is not None) | {"!", _MERGE}
_SCRIPT = "#!/"
_SHOWN = 300  # letters of a path or a parser's message; keys can have thousands


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


@dataclass(frozen=True)
class YamlFile:
    """A configuration as it is in a file.

    Attributes:
        path: path of the file, for messages.
        text: its content, line ends unchanged.
        values: result of PyYAML's ``safe_load``, as TRL reads it: YAML 1.1, so ``on`` is true and
            ``1e-5`` a string. All keys at the top are strings.
        root: the mapping at the top as a tree that knows its places in ``text``.
    """

    path: Path
    text: str = field(repr=False)
    values: Mapping[str, Any]
    root: Node = field(repr=False, compare=False)

    def line(self, *path: str) -> int | None:
        """Return the line, from 1, of a key and the keys that lead to it, or None when it is not there.

        A key that a merge (``<<``) brings has the line where it is written.
        """
        node, line = self.root, None
        for key in path:
            found = node.resolved().entry(key)
            if found is None:
                return None
            line, node = found[0].line, found[1]
        return line


def read_yaml(path: Path) -> YamlFile:
    """Return the configuration in a file.

    Raises:
        InputError: the file cannot be read, is no YAML mapping with words as keys, has a key twice, asks for objects,
            or is larger or more nested than a configuration can be. The message names the line.
    """
    return parsed(_text(path), path)


def parsed(text: str, path: Path) -> YamlFile:
    """Return the configuration that a text is; ``path`` is for messages.

    Raises:
        InputError: as in :func:`read_yaml`.
    """
    if text.startswith(_SCRIPT):
        raise InputError(f"{place(path)} is a script for a shell.", hint="Give its training command after --.")
    root, values = loaded(text, path)
    if root is None or not isinstance(values, dict):
        what = "is empty" if values is None else f"holds a {_kind(root)}"
        raise InputError(
            f"{place(path)} {what}; a configuration is a YAML mapping.", hint="Write lines of the form key: value."
        )
    _check_words(root, path)
    return YamlFile(path, text, values, root)


def loaded(text: str, path: Path) -> tuple[Node | None, object]:
    """Return a document of YAML as a tree, and its values as PyYAML loads them; ``path`` is for messages.

    Raises:
        InputError: it is no YAML, has a key twice, asks for objects, or is larger or more nested than a document that
            people write.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise _too_large(path, len(text))
    try:
        return _Loader(text, path).tree()
    except yaml.reader.ReaderError as error:
        what, line = f"the character U+{error.character:04X} is not allowed", text.count("\n", 0, error.position) + 1
        raise _refused(path, line, what, "Take it out, or write it as an escape in double quotes.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        # What cannot be constructed is named by its problem alone; its context is the kind of the value around it.
        context = None if isinstance(error, ConstructorError) else error.context
        message = ": ".join(part for part in (context, error.problem) if part)
        raise _refused(path, mark.line + 1 if mark is not None else None, message) from error
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InputError(f"{place(path)} cannot be loaded: {shown(str(error))}.") from error


class _Loader(yaml.SafeLoader):
    """Composes a document as the safe loader does; stops at the first node that breaks a limit.

    Its own nodes are made in the order of the text, each after those inside it, which it takes from the list.
    """

    def __init__(self, text: str, path: Path) -> None:
        super().__init__(text)
        self._path = path
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
                raise _refused(self._path, line, f"the anchor {event.anchor!r} holds itself")
            self._count += target.size
            span = (event.start_mark.index, event.end_mark.index, line)
            node = Node("alias", *span, key=target.key, target=target)
        else:
            if event.tag is not None and event.tag not in _KNOWN_TAGS:
                hint = "Write a plain value: TRL loads no objects from YAML."
                raise _refused(self._path, line, f"the tag {event.tag!r} is not loaded", hint)
            self._depth += is_collection
            if self._depth > MAX_DEPTH:
                raise _refused(self._path, line, f"more than {MAX_DEPTH} collections are inside one another")
            self._count += 1
            found = super().compose_node(parent, index)
            self._depth -= is_collection
            node = self._node(found, self._made[made:])
            del self._made[made:]
            if event.anchor is not None:
                self._anchored[event.anchor] = node
        if self._count > MAX_NODES:
            raise _refused(self._path, line, f"there are more than {MAX_NODES:,} keys and values, aliases expanded")
        node.size = self._count - before
        self._made.append(node)
        return found

    def _node(self, found: Any, inside: list[Node]) -> Node:
        """Return a node that is no alias, with the nodes inside it."""
        span = (found.start_mark.index, found.end_mark.index, found.start_mark.line + 1)
        if isinstance(found, yaml.ScalarNode):
            merge = found.tag == _MERGE
            key = found.value if merge else self._meaning(found)
            return Node("scalar", *span, key=key, merge=merge, style=found.style or "")
        if isinstance(found, yaml.SequenceNode):
            node = Node("sequence", *span, flow=found.flow_style, items=inside)
        else:
            entries = list(zip(inside[::2], inside[1::2], strict=True))
            self._check_keys(entries)
            node = Node("mapping", *span, flow=found.flow_style, entries=entries)
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
            raise _refused(self._path, line, message, "Quote it if it is text.") from error
        return made if isinstance(made, Hashable) else None

    def _check_keys(self, entries: list[tuple[Node, Node]]) -> None:
        seen: dict[Hashable, Node] = {}
        for key, _ in entries:
            if key.resolved().kind != "scalar":
                raise _refused(self._path, key.line, "a key is a collection", "Keys are words.")
            first = seen.setdefault((type(key.key), key.key), key)
            if first is not key:
                message = f"{_cut(str(key.key))!r} is there twice; line {first.line} has it too"
                raise _refused(self._path, key.line, message, "Keep one; the last one counts.")


def _refused(path: Path, line: int | None, message: str, hint: str = "") -> InputError:
    return InputError(f"{place(path, line)}: {shown(message)}.", hint=hint)


def _cut(value: str) -> str:
    return value if len(value) <= 40 else f"{value[:40]}…"


def place(path: Path, line: int | None = None) -> str:
    """Return a file, and a line of it, as messages name them."""
    return shown(str(path)) if line is None else f"{shown(str(path))}, line {line}"


def shown(text: str) -> str:
    """Return a text with what is not printable escaped, and what is too long cut."""
    return printable(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def _text(path: Path) -> str:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise InputError(f"{place(path)} is a directory.", hint="Name the YAML file.")
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{place(path)} is not a regular file.", hint="Name a YAML file.")
        if status.st_size > MAX_BYTES:
            raise _too_large(path, status.st_size)
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{place(path)} does not exist.", hint="Name the YAML file.") from error
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{place(path)} cannot be read: {reason}.") from error
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{place(path, line)}: it is not UTF-8.", hint="Save the file as UTF-8.") from error


def _too_large(path: Path, size: int) -> InputError:
    return InputError(
        f"{place(path)} has {size:,} bytes; a configuration has at most {MAX_BYTES:,}.",
        hint="Is it a data file?",
    )


def _check_words(root: Node, path: Path) -> None:
    """Check that what becomes an argument or an environment variable has a word for its name."""
    environment = root.own("env")
    inside = [environment[1].resolved()] if environment is not None else []
    for mapping in (root, *root.merged(), *inside):
        for key, _ in mapping.entries:
            if not key.merge and not isinstance(key.key, str):
                raise InputError(
                    f"{place(path, key.line)}: the key means {shown(repr(key.key))}, which is not a string.",
                    hint="YAML reads yes, no, on, off and numbers so; quote the key.",
                )


def _kind(root: Node | None) -> str:
    return {"sequence": "list", "mapping": "mapping"}.get(root.resolved().kind if root else "", "single value")
