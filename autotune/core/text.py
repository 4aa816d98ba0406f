"""Escapes line breaks and control characters in texts from outside, so that each stays on its line."""

from __future__ import annotations

from pathlib import Path


def printable(text: str) -> str:
    """Return a text with what is not printable escaped as in Python's literals.

    That is control characters, terminal escapes among them, every line end that Unicode knows (YAML takes U+0085 and
    U+2028 for one), and bytes of a file's name that are no UTF-8.
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def decodable(path: Path) -> bool:
    """Return whether a path is UTF-8, as everything that is written about it has to be."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True
