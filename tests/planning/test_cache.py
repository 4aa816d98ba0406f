"""The cache of traces stays within its limit: the least recently used traces are removed first."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from autotune.errors import InputError
from autotune.planning.tracing.cache import DEFAULT_LIMIT_BYTES, Cache, user_cache
from autotune.units import GIB

TEXT = "x" * 98  # a document of 100 bytes
LIMIT_BYTES = 450


def kept(directory: Path) -> set[str]:
    return {file.stem for file in directory.glob("*.json")}


@pytest.mark.parametrize(("asked", "gone"), [("", "a"), ("a", "b")])
def test_the_oldest_document_goes_first_unless_it_was_asked_for(asked: str, gone: str, tmp_path: Path) -> None:
    cache = Cache(tmp_path, LIMIT_BYTES)
    for key in "abcd":
        cache.put(key, TEXT)
    # The last use of each is far back, that of the first the furthest.
    for number, key in enumerate("abcd"):
        os.utime(tmp_path / f"{key}.json", (number, number))
    for key in asked:
        assert cache.get(str, key) == TEXT
    cache.put("e", TEXT)
    assert kept(tmp_path) == set("abcde") - {gone}
    assert cache.failure == ""


def test_what_other_processes_kept_counts(tmp_path: Path) -> None:
    first, second = Cache(tmp_path, LIMIT_BYTES), Cache(tmp_path, LIMIT_BYTES)
    for key in "abcdefgh":
        (first if key in "aceg" else second).put(key, TEXT)
    assert len(kept(tmp_path)) == 4


def test_a_document_that_another_process_removed_first_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path, LIMIT_BYTES)
    for key in "abcd":
        cache.put(key, TEXT)
    real = Path.unlink

    def removed_already(path: Path, missing_ok: bool = False) -> None:
        real(path, missing_ok=True)
        real(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", removed_already)
    cache.put("e", TEXT)
    assert cache.failure == ""
    assert len(kept(tmp_path)) == 4


def test_the_directory_is_not_read_at_each_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    real = os.scandir

    def scandir(path: Path) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
        reads.append(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    cache = Cache(tmp_path, 100 * 1000)
    for number in range(200):
        cache.put(str(number), TEXT)
    assert 1 <= len(reads) <= 1 + 200 * 100 // (100 * 1000 // 16)


def test_what_a_killed_process_left_half_written_goes_as_well(tmp_path: Path) -> None:
    left = tmp_path / ".a.json.1.part"
    left.write_text(TEXT * 5, encoding="utf-8")
    os.utime(left, (0, 0))
    Cache(tmp_path, LIMIT_BYTES).put("b", TEXT)
    assert not left.exists()
    assert kept(tmp_path) == {"b"}


def test_files_that_are_not_the_caches_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text(TEXT * 10, encoding="utf-8")
    cache = Cache(tmp_path, LIMIT_BYTES)
    for key in "abcde":
        cache.put(key, TEXT)
    assert (tmp_path / "notes.txt").exists()


def test_without_a_cache_nothing_is_kept_or_found(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(TEXT), encoding="utf-8")
    cache = Cache(tmp_path, 0)
    cache.put("b", TEXT)
    assert cache.get(str, "a") is None
    assert kept(tmp_path) == {"a"}
    assert cache.failure == ""


@pytest.mark.parametrize(("text", "limit_bytes"), [("2GiB", 2 * GIB), ("0", 0), (" 0 ", 0), ("", DEFAULT_LIMIT_BYTES)])
def test_the_limit_is_what_the_environment_says(
    text: str, limit_bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("AUTOTUNE_CACHE_LIMIT", text)
    assert user_cache().limit_bytes == limit_bytes


def test_a_limit_that_is_no_size_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_CACHE_LIMIT", "much")
    with pytest.raises(InputError, match="AUTOTUNE_CACHE_LIMIT"):
        user_cache()


def test_without_a_home_directory_nothing_is_kept_and_the_reason_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    cache = user_cache()
    cache.put("a", TEXT)
    assert cache.get(str, "a") is None
    assert cache.failure == "there is no home directory, and XDG_CACHE_HOME is not set"


def test_the_users_cache_has_the_users_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("AUTOTUNE_CACHE_LIMIT", "0")
    user_cache().put("a", TEXT)
    assert not (tmp_path / "autotune").exists()
