"""Documents kept on disk between runs, each under a fingerprint of all that it depends on."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from autotune.core.codec import encode
from autotune.core.exchange import write_document

_DIGITS = 32


def cache_directory() -> Path:
    """Return where programs of this user keep what they can make again (XDG Base Directory Specification)."""
    asked = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says that relative paths are to be ignored.
    return (Path(asked) if Path(asked).is_absolute() else Path.home() / ".cache") / "autotune"


def fingerprint(*parts: object) -> str:
    """Return a hash that is equal for equal parts."""
    return hashlib.sha256(json.dumps(encode(parts), sort_keys=True).encode()).hexdigest()[:_DIGITS]


class Cache:
    """A directory of JSON documents.

    Attributes:
        problem: why nothing is kept, in words; empty while it is.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.problem = ""
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.problem = f"{directory} cannot be made: {error.strerror}"
        else:
            if not os.access(directory, os.W_OK | os.X_OK):
                self.problem = f"{directory} is not writable"

    def get(self, key: str) -> Any | None:
        """Return what was kept, or None; what cannot be read is dropped."""
        file = self._file(key)
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except OSError:
            return None
        except ValueError:
            self.drop(key)
            return None

    def put(self, key: str, document: Any) -> None:
        """Keep a document, where that is possible."""
        if self.problem:
            return
        try:
            write_document(self._file(key), document)
        except OSError as error:
            self.problem = f"{self._directory} cannot be written: {error.strerror}"

    def drop(self, key: str) -> None:
        """Forget a document that turned out to be of no use."""
        try:
            self._file(key).unlink(missing_ok=True)
        except OSError as error:
            self.problem = f"{self._directory} cannot be written: {error.strerror}"

    def _file(self, key: str) -> Path:
        return self._directory / f"{key}.json"
