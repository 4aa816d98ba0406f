"""The files of a bundle."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune.emit.files import check_file, write_text
from autotune.errors import InputError


def test_a_file_that_a_killed_process_left_half_written_is_removed_after_a_day(tmp_path: Path) -> None:
    left, going_on = tmp_path / ".a.json.1.part", tmp_path / ".a.json.2.part"
    for part in (left, going_on):
        part.write_text("half", encoding="utf-8")
    os.utime(left, (0, 0))
    write_text(tmp_path / "a.json", "new")
    assert sorted(file.name for file in tmp_path.iterdir()) == [going_on.name, "a.json"]


def test_what_is_no_regular_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place, what in (
        (tmp_path, "a directory"),
        (tmp_path / "pipe", "not a regular file"),
        (Path("/dev/null"), "not"),
    ):
        with pytest.raises(InputError, match=rf"is {what}.*Give the name of a file with --html"):
            check_file(place, "--html")
    (tmp_path / "old").touch()
    check_file(tmp_path / "old", "--html")
    check_file(tmp_path / "new", "--html")
