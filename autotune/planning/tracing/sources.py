"""Hashes the source code that traces, so that cached traces of other versions of it are not used."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_DIGITS = 16


@cache
def source_digest() -> str:
    """Return a hash of the packages whose code a trace depends on."""
    return digest_of(Path(__file__).parents[2])


def digest_of(package: Path) -> str:
    """Return a hash of these packages in a directory, sub-packages included."""
    digest = hashlib.sha256()
    for name in ("core", "step", "trainers", "virtual"):
        for file in sorted((package / name).rglob("*.py")):
            digest.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:_DIGITS]
