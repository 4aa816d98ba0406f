"""The files of a bundle."""

from __future__ import annotations

import os
from pathlib import Path

from autotune.emit.files import write_text


def test_a_file_that_a_killed_process_left_half_written_is_removed_after_a_day(tmp_path: Path) -> None:
    left, going_on = tmp_path / ".a.json.1.part", tmp_path / ".a.json.2.part"
    for part in (left, going_on):
        part.write_text("half", encoding="utf-8")
    os.utime(left, (0, 0))
    write_text(tmp_path / "a.json", "new")
    assert sorted(file.name for file in tmp_path.iterdir()) == [going_on.name, "a.json"]
