"""Reads a TRL configuration in YAML: its values as TRL loads them, and the position of every key in the text.

It uses PyYAML's safe loader, as TRL does, and adds limits on size and depth, so that a hostile file does no harm.
"""

from __future__ import annotations

import stat
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from yaml.constructor import ConstructorError, SafeConstructor

from autotune.core.files.json_text import MAX_DEPTH
from autotune.core.files.text import printable
from autotune.errors import InputError

MAX_BYTES = 128 * 1024
"""Largest file: PyYAML takes up to 15 microseconds a byte, and configurations have a few thousand bytes."""
MAX_NODES = 10_000
"""Most keys and values of a document; those of an alias count at every reference."""

_MAX_NUMBER = 400  # characters; PyYAML's time for a number in base 60 (1:30:00) is quadratic in its length
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MERGE = "tag:yaml.org,2002:merge"
_KNOWN_TAGS = frozenset(tag for tag in SafeConstructor.yaml_constructors if tag is not None) | {"!", _MERGE}
_SHEBANG = "#!/"
_MAX_EXCERPT = 300  # characters of a path or a parser's message; a key can have thousands


@dataclass(eq=False)
class Node:
    """A scalar, a collection or an alias, with its position in the text.

    Attributes:
        start: index of its first character, its anchor and tag included.
        end: index after its last character; of a block collection, that of its last value.
        line: line of ``start``, from 1.
        key: the value of a scalar that is a key.
        merge: whether it is the key ``<<``.
        style: PyYAML's name: ``|`` or ``>`` for a block scalar, the quote, or an empty string.
        flow: whether a collection is written in brackets.
        entries: keys and values of a mapping, as written, merge keys included.
        items: values of a sequence.
        target: the node that an alias refers to.
        size: number of nodes in it, itself and the targets of aliases included.
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
        """Return the target of an alias, or the node itself."""
        return self.target if self.target is not None else self

    def own_entry(self, key: str) -> tuple[Node, Node] | None:
        """Return the last entry that the mapping itself has for a key, which counts, without merges."""
        return next((entry for entry in reversed(self.entries) if not entry[0].merge and entry[0].key == key), None)

    def entry(self, key: str) -> tuple[Node, Node] | None:
        """Return the entry for a key, from the mapping itself or from a merge (``<<``)."""
        return self.own_entry(key) or next(filter(None, (mapping.entry(key) for mapping in self.merged())), None)

    def merged(self) -> Iterator[Node]:
        """Yield the mappings that are merged into this one, in order of precedence."""
        for key, value in self.entries:
            if key.merge:
                sources = [value.resolved()] if value.resolved().kind == "mapping" else value.resolved().items
                yield from (source.resolved() for source in sources)

    @property
    def children(self) -> list[Node]:
        """The keys and values of a mapping, or the values of a sequence, as ordered in the text."""
        return [node for entry in self.entries for node in entry] or self.items

    def repeated_keys(self) -> Iterator[tuple[Node, Node]]:
        """Yield each key in it that the same mapping has before, and the first of these; the last one counts."""
        first = dict[Hashable, Node]()
        for key, _ in self.entries:
            earlier = first.setdefault((type(key.key), key.key), key)
            if earlier is not key:
                yield key, earlier
        for child in self.children:
            yield from child.repeated_keys()

    def scalars(self) -> Iterator[Node]:
        """Yield the scalars and aliases in it, as ordered in the text."""
        if self.kind in ("scalar", "alias"):
            yield self
        for child in self.children:
            yield from child.scalars()


@dataclass(frozen=True)
class YamlFile:
    """A configuration file: its text, its values, and the tree of its nodes.

    Attributes:
        path: path of the file, for messages.
        text: its content, line ends unchanged.
        values: result of PyYAML's ``safe_load``, as TRL reads it: YAML 1.1, so ``on`` is true and
            ``1e-5`` a string. The keys of the top-level mapping are strings.
        root: node of the top-level mapping.
    """

    path: Path
    text: str = field(repr=False)
    values: Mapping[str, Any]
    root: Node = field(repr=False, compare=False)

    def line(self, *path: str) -> int | None:
        """Return the line, from 1, of the key at a path of keys, or None without such a key.

        The line of a merged key (``<<``) is where it is written.
        """
        node, line = self.root, None
        for key in path:
            entry = node.resolved().entry(key)
            if entry is None:
                return None
            line, node = entry[0].line, entry[1]
        return line


def read_yaml(path: Path) -> YamlFile:
    """Return the configuration in a file.

    Raises:
        InputError: the file cannot be read, is not a YAML mapping with strings as keys, has a tag that constructs an
            object, or exceeds a limit of size or depth. The message names the line.
    """
    return parse_yaml(read_text(path), path)


def parse_yaml(text: str, path: Path) -> YamlFile:
    """Return the configuration in a text; ``path`` is for messages.

    Raises:
        InputError: as in :func:`read_yaml`.
    """
    if text.startswith(_SHEBANG):
        raise InputError(f"{location(path)} is a script for a shell.", hint="Give its training command after --.")
    root, values = load_document(text, path)
    if root is None or not isinstance(values, dict):
        what = "is empty" if values is None else f"holds a {_kind_name(root)}"
        raise InputError(
            f"{location(path)} {what}; a configuration is a YAML mapping.", hint="Write lines of the form key: value."
        )
    _check_string_keys(root, path)
    return YamlFile(path, text, values, root)


def load_document(text: str, path: Path) -> tuple[Node | None, object]:
    """Return the root node of a YAML document, and its values as PyYAML loads them; ``path`` is for messages.

    Raises:
        InputError: it is not YAML, has a tag that constructs an object, or exceeds a limit of size or depth.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise _size_error(path, len(text))
    try:
        return _Loader(text, path).tree()
    except yaml.reader.ReaderError as error:
        what, line = f"the character U+{error.character:04X} is not allowed", text.count("\n", 0, error.position) + 1
        raise _yaml_error(path, line, what, "Take it out, or write it as an escape in double quotes.") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        # The context of a ConstructorError is only the kind of the surrounding value.
        context = None if isinstance(error, ConstructorError) else error.context
        message = ": ".join(part for part in (context, error.problem) if part)
        raise _yaml_error(path, mark.line + 1 if mark is not None else None, message) from error
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InputError(f"{location(path)} cannot be loaded: {excerpt(str(error))}.") from error


def check_unique(root: Node | None, path: Path) -> None:
    """Check that no mapping has a key twice; ``path`` is for messages.

    Raises:
        InputError: one has.
    """
    for key, first in root.repeated_keys() if root is not None else ():
        message = f"{_shortened(str(key.key))!r} is there twice; line {first.line} has it too"
        raise _yaml_error(path, key.line, message, "Keep one; the last one counts.")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also builds our :class:`Node` for each of PyYAML's and enforces the limits.

    ``_nodes`` is a stack: a collection's node is built after the nodes inside it, and replaces them.
    """

    def __init__(self, text: str, path: Path) -> None:
        super().__init__(text)
        self._path = path
        self._count = 0
        self._depth = 0
        self._nodes: list[Node] = []
        self._anchored: dict[str, Node] = {}

    def tree(self) -> tuple[Node | None, object]:
        """Return the root of the only document, and its values."""
        composed = self.get_single_node()
        return (self._nodes[0], self.construct_object(composed, deep=True)) if composed is not None else (None, None)

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        composed: Any
        count_before, first_inside, line = self._count, len(self._nodes), event.start_mark.line + 1
        is_alias, is_collection = (isinstance(event, kind) for kind in (yaml.AliasEvent, yaml.CollectionStartEvent))
        if is_alias:
            composed = super().compose_node(parent, index)
            target = self._anchored.get(event.anchor)
            if target is None:
                raise _yaml_error(self._path, line, f"the anchor {event.anchor!r} holds itself")
            self._count += target.size
            span = (event.start_mark.index, event.end_mark.index, line)
            node = Node("alias", *span, key=target.key, target=target)
        else:
            if event.tag is not None and event.tag not in _KNOWN_TAGS:
                hint = "Write a plain value: TRL loads no objects from YAML."
                raise _yaml_error(self._path, line, f"the tag {event.tag!r} is not loaded", hint)
            self._depth += is_collection
            if self._depth > MAX_DEPTH:
                raise _yaml_error(self._path, line, f"more than {MAX_DEPTH} collections are inside one another")
            self._count += 1
            composed = super().compose_node(parent, index)
            self._depth -= is_collection
            node = self._node(composed, self._nodes[first_inside:])
            del self._nodes[first_inside:]
            if event.anchor is not None:
                self._anchored[event.anchor] = node
        if self._count > MAX_NODES:
            raise _yaml_error(self._path, line, f"there are more than {MAX_NODES:,} keys and values, aliases expanded")
        node.size = self._count - count_before
        self._nodes.append(node)
        return composed

    def _node(self, composed: Any, inside: list[Node]) -> Node:
        """Return the node of a scalar or a collection, given the nodes inside it."""
        span = (composed.start_mark.index, composed.end_mark.index, composed.start_mark.line + 1)
        if isinstance(composed, yaml.ScalarNode):
            merge = composed.tag == _MERGE
            key = composed.value if merge else self._key(composed)
            return Node("scalar", *span, key=key, merge=merge, style=composed.style or "")
        if isinstance(composed, yaml.SequenceNode):
            node = Node("sequence", *span, flow=composed.flow_style, items=inside)
        else:
            entries = list(zip(inside[::2], inside[1::2], strict=True))
            self._check_keys(entries)
            node = Node("mapping", *span, flow=composed.flow_style, entries=entries)
        if node.children and not node.flow:
            # PyYAML's end mark is after the empty lines that follow.
            node.end = node.children[-1].end
        return node

    def _key(self, scalar: yaml.ScalarNode) -> Hashable:
        """Return the safe loader's value of a scalar if it is hashable, else None."""
        try:
            if scalar.tag in _NUMBERS and len(scalar.value) > _MAX_NUMBER:
                raise ValueError("too long")
            value = self.construct_object(scalar, deep=True)
        except (ValueError, OverflowError, KeyError, IndexError, AttributeError) as error:
            name, line = scalar.tag.rpartition(":")[2], scalar.start_mark.line + 1
            message = f"{_shortened(scalar.value)!r} cannot be read as {name}"
            raise _yaml_error(self._path, line, message, "Quote it if it is text.") from error
        return value if isinstance(value, Hashable) else None

    def _check_keys(self, entries: list[tuple[Node, Node]]) -> None:
        for key, _ in entries:
            if key.resolved().kind != "scalar":
                raise _yaml_error(self._path, key.line, "a key is a collection", "Keys are words.")
        merges = [key for key, _ in entries if key.merge]
        if merges[1:]:
            raise _yaml_error(self._path, merges[1].line, "a mapping has two merges", "Write <<: [*a, *b].")


def _yaml_error(path: Path, line: int | None, message: str, hint: str = "") -> InputError:
    return InputError(f"{location(path, line)}: {excerpt(message)}.", hint=hint)


def _shortened(value: str) -> str:
    return value if len(value) <= 40 else f"{value[:40]}…"


def location(path: Path, line: int | None = None) -> str:
    """Return the name of a file, or of a line in it, for messages."""
    return excerpt(str(path)) if line is None else f"{excerpt(str(path))}, line {line}"


def excerpt(text: str) -> str:
    """Return a text for a message: unprintable characters escaped, cut to :data:`_MAX_EXCERPT` characters."""
    return printable(text if len(text) <= _MAX_EXCERPT else f"{text[:_MAX_EXCERPT]}…")


def read_text(path: Path, kind: str = "YAML file") -> str:
    """Return the text of a small file; ``kind`` names it in messages.

    Raises:
        InputError: it cannot be read, is no regular file, is too large, or is not UTF-8.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise InputError(f"{location(path)} is a directory.", hint=f"Name the {kind}.")
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{location(path)} is not a regular file.", hint=f"Name a {kind}.")
        if status.st_size > MAX_BYTES:
            raise _size_error(path, status.st_size)
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{location(path)} does not exist.", hint=f"Name the {kind}.") from error
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{location(path)} cannot be read: {reason}.") from error
    try:
        # Without a byte-order mark, as editors and spreadsheets write it: in a bundle, comments precede this text.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{location(path, line)}: it is not UTF-8.", hint="Save the file as UTF-8.") from error


def _size_error(path: Path, size: int) -> InputError:
    return InputError(
        f"{location(path)} has {size:,} bytes; a configuration has at most {MAX_BYTES:,}.",
        hint="Is it a data file?",
    )


def _check_string_keys(root: Node, path: Path) -> None:
    """Check that the keys of the top-level mapping and of ``env``, merged ones too, are strings."""
    environment = root.own_entry("env")
    inside = [environment[1].resolved()] if environment is not None else []
    for mapping in (root, *root.merged(), *inside):
        for key, _ in mapping.entries:
            if not key.merge and not isinstance(key.key, str):
                raise InputError(
                    f"{location(path, key.line)}: the key means {excerpt(repr(key.key))}, which is not a string.",
                    hint="YAML reads yes, no, on, off and numbers so; quote the key.",
                )


def _kind_name(root: Node | None) -> str:
    return {"sequence": "list", "mapping": "mapping"}.get(root.resolved().kind if root else "", "single value")
