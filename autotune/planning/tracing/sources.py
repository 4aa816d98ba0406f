"""Hashes the source code that traces, so that cached traces of other versions of it are not used."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

_DIGITS = 16


@cache
def source_digest() -> str:
    """Return a hash of the packages whose code a trace depends on."""
    return digest_of(Path(__file__).parents[2])


@cache
def package_digest() -> str:
    """Return a hash of all of autotune, on which what it says depends."""
    return digest_of(Path(__file__).parents[2], ("",), ("*.py", "*.yaml"))


def digest_of(
    package: Path, parts: Sequence[str] = ("core", "step", "trainers", "virtual"), patterns: Sequence[str] = ("*.py",)
) -> str:
    """Return a hash of the files of parts of a directory, sub-directories included."""
    digest = hashlib.sha256()
    for name in parts:
        for file in sorted(file for pattern in patterns for file in (package / name).rglob(pattern)):
            digest.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:_DIGITS]
