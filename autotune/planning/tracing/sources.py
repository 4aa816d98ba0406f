"""The state of the code that traces, so that traces by other code are not taken for its own."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_DIGITS = 16


@cache
def source_digest() -> str:
    """Return a hash of the packages that a trace runs through."""
    return digest_of(Path(__file__).parents[2])


def digest_of(package: Path) -> str:
    """Return a hash of those packages in a directory, sub-packages included."""
    digest = hashlib.sha256()
    for name in ("core", "step", "trainers", "virtual"):
        for file in sorted((package / name).rglob("*.py")):
            digest.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:_DIGITS]
