"""A reader finds a whole new file, or the previous one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune.core.files.atomic import written_atomically


def write_folder(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "rows").write_text(text, encoding="utf-8")


def fail_in_the_middle(part: Path) -> None:
    write_folder(part, "half")
    raise RuntimeError


def fail_in_a_file(part: Path) -> None:
    part.write_text("half", encoding="utf-8")
    raise RuntimeError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_replaces_the_one_that_was_there(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text("old", encoding="utf-8")
    with written_atomically(file) as part:
        part.write_text("new", encoding="utf-8")
        assert file.read_text(encoding="utf-8") == "old"
    assert file.read_text(encoding="utf-8") == "new"
    assert names(tmp_path) == ["result.json"]


def test_a_directory_replaces_the_one_that_was_there(tmp_path: Path) -> None:
    write_folder(tmp_path / "tokenized", "old")
    with written_atomically(tmp_path / "tokenized") as part:
        write_folder(part, "new")
    assert (tmp_path / "tokenized" / "rows").read_text(encoding="utf-8") == "new"
    assert names(tmp_path) == ["tokenized"]


def test_a_directory_that_a_killed_process_left_half_written_is_removed_after_a_day(tmp_path: Path) -> None:
    left, going_on = tmp_path / ".tokenized.1.part", tmp_path / ".tokenized.2.part"
    write_folder(left, "half")
    os.utime(left, (0, 0))
    write_folder(going_on, "half")
    with written_atomically(tmp_path / "tokenized") as part:
        write_folder(part, "new")
    assert names(tmp_path) == [going_on.name, "tokenized"]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    write_folder(tmp_path / "tokenized", "old")
    (tmp_path / "a.json").write_text("old", encoding="utf-8")
    with pytest.raises(RuntimeError), written_atomically(tmp_path / "tokenized") as part:
        fail_in_the_middle(part)
    with pytest.raises(RuntimeError), written_atomically(tmp_path / "a.json") as part:
        fail_in_a_file(part)
    assert names(tmp_path) == ["a.json", "tokenized"]
    assert (tmp_path / "tokenized" / "rows").read_text(encoding="utf-8") == "old"
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "old"


def test_two_that_write_a_target_at_a_time_write_to_paths_of_their_own(tmp_path: Path) -> None:
    """Processes of two machines may have the same id."""
    with written_atomically(tmp_path / "a.json") as first, written_atomically(tmp_path / "a.json") as second:
        assert first != second
        first.write_text("1", encoding="utf-8")
        second.write_text("2", encoding="utf-8")
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "1"
