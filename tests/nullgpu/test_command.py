"""A command runs with null GPUs, ends with all its processes, and its records are read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.core.documents.dry_run import CommandExit, Loader, ProcessRecord, UnsupportedCall
from autotune.core.files.codec import encode
from autotune.nullgpu import command as module
from autotune.nullgpu.build import SONAMES
from autotune.nullgpu.command import CommandResult, run
from autotune.nullgpu.devices import null_device
from tests.probing.processes import running, wait_until

Run = Callable[..., CommandResult]


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a shell command with an empty library in place of that of the null GPUs."""
    empty, folder = tmp_path / "library", tmp_path / "records"
    empty.mkdir()
    folder.mkdir()
    (empty / SONAMES).touch()
    monkeypatch.setattr(module, "library_folder", lambda *_: empty)
    monkeypatch.chdir(tmp_path)

    def of(script: str, timeout_seconds: float | None = 60.0) -> CommandResult:
        device = null_device("24GiB")
        return run(["sh", "-c", script], device, 2, folder, steps=3, as_shuffled=True, timeout_seconds=timeout_seconds)

    return of


@pytest.mark.parametrize(
    ("script", "ending"), [("exit 0", CommandExit(0)), ("exit 7", CommandExit(7)), ("kill -9 $$", CommandExit(None, 9))]
)
def test_how_the_command_ends_is_told(ran: Run, script: str, ending: CommandExit) -> None:
    assert ran(script).ending == ending


def test_a_program_whose_folder_has_an_equals_sign_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Run
) -> None:
    script = tmp_path / "lr=1e-5" / "run.sh"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\nexit 7\n")
    script.chmod(0o755)
    monkeypatch.setattr(module, "interpreter", lambda *_: Path("python"))
    device, records = null_device("24GiB"), tmp_path / "records"
    found = run([str(script)], device, 1, records, steps=3, as_shuffled=False, timeout_seconds=60.0)
    assert found.ending == CommandExit(7)


def test_the_command_finds_null_gpus_and_what_is_asked_of_it(ran: Run) -> None:
    ran('echo "$NULLGPU_COUNT $WANDB_MODE" > seen; cat "$AUTOTUNE_DRY_RUN/request.json" > request')
    assert Path("seen").read_text() == "2 disabled\n"
    assert json.loads(Path("request").read_text()) == {"steps": 3, "as_shuffled": True}


def test_what_its_processes_wrote_down_is_read(ran: Run, tmp_path: Path) -> None:
    written = ProcessRecord(7, 1, 2, True, "stopped", 3, loaders=(Loader("as shuffled"),))
    first: Any = {**encode(written), "pid": 9, "rank": 0}
    for number, record in enumerate((encode(written), first)):
        (tmp_path / "records" / f"process-{number}.json").write_text(json.dumps(record))
    found = ran('printf "cudaGraphLaunch\\tCUDA graphs\\ncudaGraphLaunch\\tCUDA graphs\\n" > "$NULLGPU_REFUSED"')
    assert [each.pid for each in found.processes] == [9, 7]
    assert found.processes[1] == written
    assert found.refused == (UnsupportedCall("cudaGraphLaunch", "CUDA graphs"),)


def ended(*files: str) -> bool:
    """Return whether the processes whose ids are in files have ended."""
    numbers = [int(Path(file).read_text()) for file in files]
    return wait_until(lambda: not running(numbers))


def test_when_its_time_is_up_all_is_ended_that_it_started_in_other_sessions_too(
    ran: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, passed = Path("started"), count(1000.0, 1000.0)
    clock = SimpleNamespace(monotonic=lambda: next(passed) if started.exists() else 0.0, sleep=time.sleep)
    monkeypatch.setattr(module, "time", clock)
    found = ran("setsid sleep 60 & echo $! > other; echo $$ > own; : > started; wait")
    assert found.ending == CommandExit(None, timed_out=True)
    assert ended("other", "own")


def test_what_goes_on_after_all_ranks_are_done_is_ended(ran: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.1)
    found = ran('echo $$ > own; touch "$AUTOTUNE_DRY_RUN/all-stopped"; sleep 60')
    assert found.ending == CommandExit(0)
    assert ended("own")
