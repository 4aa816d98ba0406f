"""SIGTERM and SIGHUP from schedulers, containers and closed terminals end a command as Ctrl-C does."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import autotune

# The API's function stands in for one that takes minutes: it has temporary rows, and waits until it is ended.
SCRIPT = """
import signal, sys, time, types
from pathlib import Path
for number in {ignored!r}:
    signal.signal(number, signal.SIG_IGN)
from autotune.core.files.scratch import scratch_folder

def waiting(**options):
    with scratch_folder() as folder:
        Path(folder, "tokenized").mkdir()
        print("waiting", flush=True)
        try:
            while True:
                time.sleep(0.05)  # signal.pause() would miss one that comes right before it
        finally:
            for number in {again!r}:
                signal.raise_signal(number)
            Path(folder, "tokenized", "rows").write_text("late")

for name in ("probe", "plan", "lengths"):
    module = sys.modules[("autotune.api." if name == "probe" else "autotune.app.") + name] = types.ModuleType(name)
    setattr(module, name, waiting)
check = sys.modules["autotune.app.check.check"] = types.ModuleType("check")
check.check_each = lambda *asked: waiting()

from autotune.cli.boundary import run
sys.exit(run(["autotune", *{words!r}]))
"""


def script(words: Sequence[str], again: Sequence[int] = (), ignored: Sequence[int] = ()) -> str:
    """Return a program that runs a command, ignores signals from the start, and gets some again while it ends."""
    return SCRIPT.format(words=list(words), again=list(map(int, again)), ignored=list(map(int, ignored)))


def started(
    words: Sequence[str], folder: Path, *, again: Sequence[int] = (), ignored: Sequence[int] = ()
) -> subprocess.Popen[str]:
    """Start a command that waits until it is ended, with temporary rows in ``folder``."""

    running = subprocess.Popen(
        [sys.executable, "-c", script(words, again, ignored)],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "waiting\n"
    return running


@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        (["probe", "M", "D"], signal.SIGTERM, 143),
        (["plan", "M", "D"], signal.SIGHUP, 129),
        (["check", "c.yaml"], signal.SIGTERM, 143),
        (["lengths", "M", "D"], signal.SIGTERM, 143),
        (["lengths", "M", "D"], signal.SIGINT, 130),
    ],
)
def test_a_command_that_is_asked_to_end_cleans_up_and_says_by_its_code_what_ended_it(
    words: list[str], number: signal.Signals, code: int, tmp_path: Path
) -> None:
    running = started(words, tmp_path)
    running.send_signal(number)
    _, err = running.communicate(timeout=120)
    assert running.returncode == code, err
    assert list(tmp_path.iterdir()) == []
    assert "autotune: Interrupted." in err
    assert ("probe M D --resume" in err) == (words[0] == "probe")
    assert "Traceback" not in err


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_scheduler_that_repeats_itself_does_not_disturb_the_end(first: signal.Signals, tmp_path: Path) -> None:
    running = started(["probe", "M", "D"], tmp_path, again=(signal.SIGTERM, signal.SIGHUP))
    running.send_signal(first)
    _, err = running.communicate(timeout=120)
    assert (running.returncode, list(tmp_path.iterdir())) == (128 + first, []), err
    assert "Traceback" not in err


def test_what_a_killed_command_left_is_removed_by_the_next_one_and_nothing_of_one_that_runs(tmp_path: Path) -> None:
    killed, running = (started(["lengths", "M", "D"], tmp_path) for _ in range(2))
    killed.kill()
    killed.communicate(timeout=30)
    before = set(tmp_path.iterdir())
    following = started(["lengths", "M", "D"], tmp_path)
    after = set(tmp_path.iterdir())
    assert (len(before - after), len(before & after), len(after - before)) == (1, 1, 1)
    for each in (running, following):
        each.terminate()
        each.communicate(timeout=30)
    assert list(tmp_path.iterdir()) == []


def test_nohup_is_heeded(tmp_path: Path) -> None:
    running = started(["lengths", "M", "D"], tmp_path, ignored=[signal.SIGHUP])
    running.send_signal(signal.SIGHUP)
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 143, err


def test_a_terminal_that_is_closed_ends_a_command_without_a_crash(tmp_path: Path) -> None:
    child, terminal = pty.fork()
    if not child:
        waits = [sys.executable, "-c", script(["lengths", "M", "D"])]
        os.execve(sys.executable, waits, {**os.environ, "TMPDIR": str(tmp_path)})
    shown = b""
    while b"waiting" not in shown:
        shown += os.read(terminal, 1000)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert list(tmp_path.iterdir()) == []


def test_the_python_api_installs_no_handlers() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with pytest.raises(autotune.AutotuneError):
        autotune.lengths("/nowhere/at/all", "/nowhere/at/all")
    assert {number: signal.getsignal(number) for number in before} == before
