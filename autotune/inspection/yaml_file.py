"""Reads a TRL configuration in YAML safely: its values as TRL sees them, and the line of every key."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.core.text import printable
from autotune.errors import InputError
from autotune.inspection.yaml_tree import Node, TreeError, tree

MAX_BYTES = 128 * 1024
"""PyYAML reads up to 15 microseconds a byte; configurations have a few thousand bytes."""

_SCRIPT = "#!/"
_SHOWN = 300  # letters of a path or a parser's message; keys can have thousands


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
        return tree(text)
    except TreeError as error:
        raise InputError(f"{place(path, error.line)}: {shown(str(error))}.", hint=error.hint) from error
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InputError(f"{place(path)} cannot be loaded: {shown(str(error))}.") from error


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
            raise InputError(f"{place(path)} is no regular file.", hint="Name a YAML file.")
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
                    f"{place(path, key.line)}: the key means {shown(repr(key.key))}, which is no string.",
                    hint="YAML reads yes, no, on, off and numbers so; quote the key.",
                )


def _kind(root: Node | None) -> str:
    return {"sequence": "list", "mapping": "mapping"}.get(root.resolved().kind if root else "", "single value")
