"""Escapes unprintable characters in messages, and handles suffixes and encodings of file names."""

from __future__ import annotations

from pathlib import Path, PurePath

COMPRESSIONS = frozenset({".gz", ".bz2", ".xz", ".zst"})
"""Suffixes of compressed files that ``datasets`` decompresses."""


def printable(text: str) -> str:
    """Return a text with unprintable characters escaped as in Python's literals.

    These are control characters, terminal escapes among them, all of Unicode's line ends (also YAML's U+0085 and
    U+2028), and bytes of a file name that are not UTF-8.
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def uncompressed(name: str | PurePath) -> PurePath:
    """Return a path without a compression's suffix: ``rows.jsonl`` for ``rows.jsonl.gz``."""
    path = PurePath(name)
    return path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path


def decodable(path: Path) -> bool:
    """Return whether a path is UTF-8, and so can be written to documents."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True
