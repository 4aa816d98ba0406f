"""Names what is wrong with a file of rows that ``datasets`` cannot load, such as the first broken line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from autotune.core.files.json_text import read_json
from autotune.errors import InputError

_QUOTED_CHARACTERS = 60
_ZSTANDARD = "zstandard"
"""The package with which ``datasets`` decompresses ``.zst``; Python has a module for it from 3.14 on."""
_FIRST_BYTES = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": _ZSTANDARD}
"""The first bytes by which ``datasets`` recognises a compressed file (``datasets.utils.extract``)."""


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


def check_lines(file: Path) -> None:
    """Check that each line of a file of JSON Lines is an object.

    A ``.json`` file whose first line is no object has another form, such as an array, and is not checked.

    Raises:
        InputError: a line is not an object; the message has its number and the reason.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            why = _fault(content)
            if why and number == 1 and (content.lstrip().startswith(b"[") or file.suffix.lower() != ".jsonl"):
                return
            if why:
                text = content.decode("utf-8", "replace").strip()
                quoted = text if len(text) <= _QUOTED_CHARACTERS else f"{text[:_QUOTED_CHARACTERS]}…"
                raise InputError(f"Line {number} of {file} is not a JSON object: {why}.", hint=f"It reads: {quoted}")


def _fault(line: bytes) -> str:
    """Return why a line is not a JSON object; empty if it is one, or blank."""
    try:
        row = read_json(line.strip().decode("utf-8"), finite=False) if line.strip() else {}
    except json.JSONDecodeError as error:
        return f"{error.msg} at column {error.colno}"
    except ValueError as error:  # also of UTF-8
        return str(error)
    return "" if isinstance(row, dict) else "it has another type"


def nested_rows_hint(row: Mapping[str, object]) -> str:
    """Return a hint if one field of an object holds the rows, as in ``{"version": 1, "data": [{…}, …]}``, else ""."""
    for name, value in row.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            return (
                f"It is one JSON object, whose `{name}` holds a list of {len(value):,}: TRL reads it as one row. Write"
                " that list as JSON lines."
            )
    return ""
