"""Temporary folders go with their process; what a killed one left goes with the next that starts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from autotune.probing.scratch import ScratchFolder

HOLDING = (
    "import sys; from autotune.probing.scratch import ScratchFolder; folder = ScratchFolder();"
    "(folder.path / 'rows').write_text('1'); print(folder.path, flush=True); sys.stdin.read()"
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder of the test's own the one for temporary files, here and in child processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def another() -> tuple[subprocess.Popen[str], Path]:
    """Start another process with such a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_removed_with_what_is_in_it(temporary: Path) -> None:
    with ScratchFolder() as folder:
        (folder / "rows").write_text("1")
        assert folder.parent == temporary
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next_and_what_a_running_one_uses_stays() -> None:
    running, used = another()
    killed, left = another()
    killed.kill()
    killed.communicate()
    with ScratchFolder():
        assert (used / "rows").exists()
        assert not left.exists()
    running.communicate()
    assert not used.exists()


def test_folders_that_others_made_stay(temporary: Path) -> None:
    named_alike = temporary / "autotune-M-D"
    named_alike.mkdir()
    linked = temporary / "elsewhere"
    linked.mkdir()
    (linked / ".autotune-scratch").touch()
    (temporary / "autotune-link").symlink_to(linked)
    foreign = temporary / "autotune-foreign"
    foreign.mkdir()
    (foreign / ".autotune-scratch").touch()
    if os.geteuid() == 0:
        os.chown(foreign, 12345, -1)
    with ScratchFolder():
        assert named_alike.exists()
        assert (linked / ".autotune-scratch").exists()
        assert foreign.exists() or os.geteuid() != 0
