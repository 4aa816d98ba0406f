"""Caches JSON documents on disk, each under a fingerprint of its inputs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from autotune.core.files.atomic import cache_directory, reason_of
from autotune.core.files.codec import decoded, encode
from autotune.core.jobs.exchange import write_document
from autotune.errors import InputError
from autotune.units import MIB, parse_size

_DocumentT = TypeVar("_DocumentT")
DEFAULT_LIMIT_BYTES = 512 * MIB
"""Size limit for all documents together, if ``AUTOTUNE_CACHE_LIMIT`` sets no other."""
_LIMIT_VARIABLE = "AUTOTUNE_CACHE_LIMIT"
_DIGITS = 32
# Writes between two scans of the directory, as a share of the limit, which documents may exceed by this much.
_SCAN_SHARE = 1 / 16


def user_cache() -> Cache:
    """Return the cache of all runs of this user, with the limit of ``AUTOTUNE_CACHE_LIMIT``, such as ``2GiB`` or ``0``.

    Raises:
        InputError: the limit is not a size.
    """
    text = os.environ.get(_LIMIT_VARIABLE, "").strip() or f"{DEFAULT_LIMIT_BYTES}"
    try:
        limit_bytes = 0 if text == "0" else parse_size(text)
    except InputError as error:
        raise InputError(
            f"{_LIMIT_VARIABLE}={text} is not a size.", hint="Write for instance 2GiB, or 0 for no cache."
        ) from error
    try:
        return Cache(cache_directory(), limit_bytes)
    except InputError:
        return Cache(Path(), 0, failure="there is no home directory, and XDG_CACHE_HOME is not set")


def fingerprint(*parts: object) -> str:
    """Return a hash that is equal for equal parts."""
    return hashlib.sha256(json.dumps(encode(parts), sort_keys=True).encode()).hexdigest()[:_DIGITS]


class Cache:
    """Least-recently-used cache of JSON documents in a directory, which several processes may share.

    Reading a document sets its file's modification time, by which the oldest ones are removed beyond the limit.

    Attributes:
        limit_bytes: size limit of all documents together; 0: nothing is read or written.
        failure: why documents cannot be written, in words; empty if they can, or if the limit is 0.
    """

    def __init__(self, directory: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES, *, failure: str = "") -> None:
        self._directory = directory
        self.limit_bytes = limit_bytes
        # The first write triggers a scan: the directory may have documents of other runs.
        self._unscanned_bytes = limit_bytes
        self.failure = failure

    @property
    def is_enabled(self) -> bool:
        """Whether documents are written."""
        return bool(self.limit_bytes) and not self.failure

    def get(self, kind: type[_DocumentT], key: str) -> _DocumentT | None:
        """Return a document decoded as a class; None without one, or if it cannot be decoded."""
        if not self.limit_bytes:
            return None
        file = self._directory / f"{key}.json"
        document = decoded(kind, file)
        with suppress(OSError):  # another process has just removed it, or the directory is read-only
            os.utime(file)
        return document

    def put(self, key: str, value: object) -> None:
        """Write an object as a document; an error sets :attr:`failure`."""
        if not self.is_enabled:
            return
        file = self._directory / f"{key}.json"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            write_document(file, encode(value))
            with suppress(FileNotFoundError):
                self._unscanned_bytes += file.stat().st_size
            if self._unscanned_bytes > self.limit_bytes * _SCAN_SHARE:
                self._unscanned_bytes = 0
                self._evict()
        except OSError as error:
            self.failure = f"{self._directory} cannot be written: {reason_of(error)}"

    def _evict(self) -> None:
        """Remove the least recently read documents, and partial files of killed writers, until the rest fits."""
        files: list[tuple[int, int, str]] = []
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.endswith((".json", ".part")):
                    with suppress(FileNotFoundError):  # another process may remove documents concurrently
                        files.append((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path))
        kept_bytes = 0
        for _, size, file in sorted(files, reverse=True):
            kept_bytes += size
            if kept_bytes > self.limit_bytes:
                Path(file).unlink(missing_ok=True)


_DIGEST_DIGITS = 16


@cache
def package_digest() -> str:
    """Return a hash of autotune's sources, on which all cached documents depend."""
    return digest_of(Path(__file__).parents[2])


def digest_of(package: Path, parts: Sequence[str] = ("",), patterns: Sequence[str] = ("*.py", "*.yaml")) -> str:
    """Return a hash of the files in sub-directories of a directory, recursively; of all by default."""
    digest = hashlib.sha256()
    for name in parts:
        for file in sorted(file for pattern in patterns for file in (package / name).rglob(pattern)):
            digest.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:_DIGEST_DIGITS]
