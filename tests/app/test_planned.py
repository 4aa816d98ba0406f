"""The identity of the files of a workload that is read for a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.app.planned import state_of


def test_a_file_that_vanishes_while_its_directory_is_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept.json").write_text("{}", encoding="utf-8")
    gone = tmp_path / "gone.json"
    monkeypatch.setattr(Path, "rglob", lambda folder, _: [folder / "kept.json", gone])
    monkeypatch.setattr(Path, "is_file", lambda path: path.suffix == ".json")
    found = state_of(str(tmp_path))
    assert found is not None
    assert [name for name, _, _ in found] == ["kept.json"]


def test_a_link_to_itself_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text("{}", encoding="utf-8")
    (tmp_path / "loop").symlink_to("loop")
    found = state_of(str(tmp_path))
    assert found is not None
    assert [name for name, _, _ in found] == ["kept.json"]
