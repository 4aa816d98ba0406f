"""Texts from outside: escapes of line breaks and control characters, and names of files."""

from __future__ import annotations

from pathlib import Path, PurePath

COMPRESSIONS = frozenset({".gz", ".bz2", ".xz", ".zst"})
"""Last suffixes of compressed files, which ``datasets`` decompresses."""


def printable(text: str) -> str:
    """Return a text with what is not printable escaped as in Python's literals.

    That is control characters, terminal escapes among them, every line end that Unicode knows (YAML takes U+0085 and
    U+2028 for one), and bytes of a file's name that are no UTF-8.
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def uncompressed(name: str | PurePath) -> PurePath:
    """Return a path without the suffix of a compression: ``rows.jsonl`` for ``rows.jsonl.gz``."""
    path = PurePath(name)
    return path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path


def decodable(path: Path) -> bool:
    """Return whether a path is UTF-8, as everything that is written about it has to be."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True
