"""Keeps documents on disk between runs, each under a fingerprint of everything that it depends on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from autotune.core.codec import decode, encode
from autotune.core.exchange import write_document
from autotune.core.files import cache_directory
from autotune.core.json_text import read_json
from autotune.errors import InputError
from autotune.units import MIB, parse_size

_Kind = TypeVar("_Kind")
DEFAULT_LIMIT_BYTES = 512 * MIB
"""Size limit for all documents together, unless the user's environment sets another."""
_LIMIT_VARIABLE = "AUTOTUNE_CACHE_LIMIT"
_DIGITS = 32
# The directory is scanned again after this share of the limit was written, so it may exceed the limit by that much.
_CHECKED_SHARE = 1 / 16


def cache_limit_bytes() -> int:
    """Return the size limit of the user's cache in bytes; ``AUTOTUNE_CACHE_LIMIT`` sets it, such as ``2GiB`` or ``0``.

    Raises:
        InputError: the variable is not a size.
    """
    asked = os.environ.get(_LIMIT_VARIABLE, "").strip()
    if asked in ("", "0"):
        return 0 if asked else DEFAULT_LIMIT_BYTES
    try:
        return parse_size(asked)
    except InputError as error:
        raise InputError(
            f"{_LIMIT_VARIABLE}={asked} is not a size.", hint="Write for instance 2GiB, or 0 for no cache."
        ) from error


def user_cache() -> Cache:
    """Return the cache that all runs of this user share.

    Raises:
        InputError: its limit is not a size.
    """
    limit_bytes = cache_limit_bytes()
    try:
        return Cache(cache_directory(), limit_bytes)
    except InputError:
        unkept = Cache(Path(), 0)
        unkept.failure = "there is no home directory, and XDG_CACHE_HOME is not set"
        return unkept


def fingerprint(*parts: object) -> str:
    """Return a hash that is equal for equal parts."""
    return hashlib.sha256(json.dumps(encode(parts), sort_keys=True).encode()).hexdigest()[:_DIGITS]


class Cache:
    """A directory of JSON documents, which several processes may share.

    When the documents exceed the limit, the least recently read ones are removed; reading a document sets its file's
    modification time.

    Attributes:
        failure: why documents cannot be kept, in words; empty while they can, and if the limit is 0.
    """

    def __init__(self, directory: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        # The size of what other runs left is not known yet, so the first document triggers a scan of the directory.
        self._unchecked_bytes = limit_bytes
        self.failure = ""
        if not limit_bytes:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.failure = f"{directory} cannot be made: {error.strerror}"
        else:
            if not os.access(directory, os.W_OK | os.X_OK):
                self.failure = f"{directory} is not writable"

    @property
    def keeps(self) -> bool:
        """Whether documents are kept between runs."""
        return bool(self._limit_bytes) and not self.failure

    def get(self, kind: type[_Kind], key: str) -> _Kind | None:
        """Return the document as an object of a class, or None if there is none; a document of another is removed."""
        if not self._limit_bytes:
            return None
        file = self._file(key)
        try:
            found = decode(kind, read_json(file.read_text(encoding="utf-8")))
        except OSError:
            return None
        except ValueError:
            self._drop(file)
            return None
        with suppress(OSError):  # another process has just removed it, or the directory can only be read
            os.utime(file)
        return found

    def put(self, key: str, value: object) -> None:
        """Keep an object as a document; if that fails, record the failure and go on."""
        if not self.keeps:
            return
        file = self._file(key)
        try:
            write_document(file, encode(value))
            with suppress(FileNotFoundError):
                self._unchecked_bytes += file.stat().st_size
            if self._unchecked_bytes > self._limit_bytes * _CHECKED_SHARE:
                self._unchecked_bytes = 0
                self._shrink()
        except OSError as error:
            self.failure = f"{self._directory} cannot be written: {error.strerror}"

    def _drop(self, file: Path) -> None:
        """Remove a document that cannot be used."""
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            self.failure = f"{self._directory} cannot be written: {error.strerror}"

    def _shrink(self) -> None:
        """Remove the least recently read documents until the others are within the limit."""
        oldest_first = sorted(self._files())
        excess_bytes = sum(size for _, size, _ in oldest_first) - self._limit_bytes
        for _, size, file in oldest_first:
            if excess_bytes <= 0:
                return
            file.unlink(missing_ok=True)
            excess_bytes -= size

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Yield modification time, bytes and path of each document, including partial files of killed writers."""
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.endswith((".json", ".part")):
                    with suppress(FileNotFoundError):  # another process removes documents as well
                        found = entry.stat()
                        yield found.st_mtime_ns, found.st_size, Path(entry.path)

    def _file(self, key: str) -> Path:
        return self._directory / f"{key}.json"


_DIGEST_DIGITS = 16


@cache
def package_digest() -> str:
    """Return a hash of all of autotune, on which all cached documents depend."""
    return digest_of(Path(__file__).parents[2])


def digest_of(package: Path, parts: Sequence[str] = ("",), patterns: Sequence[str] = ("*.py", "*.yaml")) -> str:
    """Return a hash of the files of parts of a directory, sub-directories included."""
    digest = hashlib.sha256()
    for name in parts:
        for file in sorted(file for pattern in patterns for file in (package / name).rglob(pattern)):
            digest.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:_DIGEST_DIGITS]
