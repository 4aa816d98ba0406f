"""Checks that a JSON file, compressed or not, has rows, and reports the first broken line."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from io import BufferedIOBase, BufferedReader
from pathlib import Path

from autotune.core.json_text import read_json
from autotune.core.text import uncompressed
from autotune.errors import InputError
from autotune.units import MIB

CHECKED_BYTES = 64 * MIB
"""Bytes of a file that are checked, in about a second; ``datasets`` finds later broken lines when it loads the file."""

_QUOTED_CHARACTERS = 60
_ZSTANDARD = "zstandard"
"""The package with which ``datasets`` decompresses ``.zst``; Python has a module for it from 3.14 on."""
_FIRST_BYTES = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": _ZSTANDARD}
"""The first bytes by which ``datasets`` recognises a compressed file (``datasets.utils.extract``)."""
_READERS: Mapping[str | None, Callable[[BufferedReader], BufferedIOBase]] = {
    "gzip": lambda stream: gzip.GzipFile(fileobj=stream), "bzip2": bz2.BZ2File, "xz": lzma.LZMAFile,
    None: lambda stream: stream,
}  # fmt: skip


def compression(file: Path) -> str | None:
    """Return the compression of a file by its first bytes, or None.

    Raises:
        InputError: the package that decompresses it is not installed.
    """
    with file.open("rb") as stream:
        start = stream.read(max(map(len, _FIRST_BYTES)))
    name = next((name for first, name in _FIRST_BYTES.items() if start.startswith(first)), None)
    if name == _ZSTANDARD and find_spec(_ZSTANDARD) is None:
        raise InputError(
            f"{file} cannot be decompressed without the package {_ZSTANDARD}.", hint=f"pip install {_ZSTANDARD}"
        )
    return name


@contextmanager
def _decompressed(file: Path, compressed: str | None) -> Iterator[BufferedIOBase]:
    """Open a file to read its decompressed bytes."""
    try:
        with file.open("rb") as stream, _READERS[compressed](stream) as content:
            yield content
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise InputError(f"{file} cannot be decompressed: {error}.", hint="Write or download it again.") from error


def check_json(file: Path, limit_bytes: int = CHECKED_BYTES) -> None:
    """Check that a JSON file has rows for ``datasets``: one object per line (JSON Lines), or an array of objects.

    The first line decides: a ``.jsonl`` file is JSON Lines unless it begins with ``[``; a ``.json`` file only if its
    first line is a whole object. Of JSON Lines, the first ``limit_bytes`` are checked. An array that is compressed or
    larger than that is not checked, and neither is a file compressed by Zstandard.

    Raises:
        InputError: the file has another form or no rows; the message names the broken line and the reason.
    """
    compressed = compression(file)
    if compressed == _ZSTANDARD:
        return
    with _decompressed(file, compressed) as stream:
        first_line = stream.readline(limit_bytes).removeprefix(codecs.BOM_UTF8).lstrip()
    if not first_line.startswith(b"[") and (uncompressed(file).suffix.lower() == ".jsonl" or _is_object(first_line)):
        with _decompressed(file, compressed) as stream:
            _check_lines(file, stream, limit_bytes)
        return
    if compressed or file.stat().st_size > limit_bytes:
        return
    document = _parse(file.read_bytes().removeprefix(codecs.BOM_UTF8), str(file), "line {0.lineno}, column {0.colno}")
    if not isinstance(document, list):  # datasets reads a lone object as a single row
        nested = nested_rows_hint(document) if isinstance(document, dict) else ""
        raise InputError(f"{file} holds {_kind(document)}, not rows.", hint=nested or "Write an array of objects.")
    check_row_count(file, len(document))


def check_row_count(source: Path, rows: int) -> None:
    """Check that a file or directory has a row.

    Raises:
        InputError: it has none.
    """
    if not rows:
        raise InputError(f"{source} has no rows.", hint="Give a dataset that has some.")


def nested_rows_hint(row: Mapping[str, object]) -> str:
    """Return a hint if one field of an object holds the rows, as in ``{"version": 1, "data": [{…}, …]}``, else ""."""
    for name, value in row.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            return (
                f"It is one JSON object, whose `{name}` holds a list of {len(value):,}: TRL reads it as one row. Write"
                " that list as JSON lines."
            )
    return ""


def _check_lines(file: Path, lines: BufferedIOBase, limit_bytes: int) -> None:
    rows = read = 0
    for number, line in enumerate(lines, start=1):
        read += len(line)
        content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if content.strip():
            _check_line(content, f"Line {number} of {file}")
            rows += 1
        if read > limit_bytes:
            return
    check_row_count(file, rows)


def _check_line(content: bytes, name: str) -> None:
    text = content.decode("utf-8", "replace").strip()
    hint = f"It reads: {text if len(text) <= _QUOTED_CHARACTERS else f'{text[:_QUOTED_CHARACTERS]}…'}"
    row = _parse(content.rstrip(b"\r\n"), name, "column {0.colno}", hint)
    if not isinstance(row, dict):
        raise InputError(f"{name} is {_kind(row)}, not an object.", hint=hint)


def _parse(content: bytes, name: str, position: str, hint: str = "") -> object:
    """Return the value of a JSON file, or of one line of it.

    Args:
        name: of the file or line, for messages.
        position: format of the position of an error, from the attributes of a ``json.JSONDecodeError``.

    Raises:
        InputError: the content is not JSON in UTF-8.
    """
    try:
        return read_json(content.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(f"{name} is not JSON: {error.msg} at {position.format(error)}.", hint=hint) from error
    except UnicodeDecodeError as error:
        message = f"{name} is not UTF-8: {error.reason} at byte {error.start + 1}."
        raise InputError(message, hint="Save the file as UTF-8.") from error
    except ValueError as error:
        raise InputError(f"{name} cannot be read: {error}.", hint=hint) from error


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(read_json(line.decode("utf-8")), dict)
    except ValueError:
        return False


def _kind(value: object) -> str:
    names = {type(None): "null", list: "an array", dict: "an object", str: "a text", bool: "true or false"}
    return names.get(type(value), "a number")
