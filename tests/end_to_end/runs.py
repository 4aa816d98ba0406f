"""Runs the command line in separate processes, as a user does, with a shorter quick effort."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
ABORTED_AT_EXIT = "terminate called without an active exception"


@dataclass(frozen=True)
class Ended:
    """A command that ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """What it wrote to standard output, read as JSON."""
        return json.loads(self.out)


def command(*words: str | Path, root: Path = ROOT) -> tuple[list[str], dict[str, str]]:
    """Return the command line of ``autotune`` and its environment; ``root`` holds the package and its tests."""
    environment = {**os.environ, "PYTHONPATH": str(root), "COLUMNS": "100"}
    return [sys.executable, "-m", "tests.brief", *map(str, words)], environment


def autotune(*words: str | Path, folder: Path, root: Path = ROOT, timeout: float = 240) -> Ended:
    """Run ``autotune`` in a folder and wait for its end."""
    line, environment = command(*words, root=root)
    done = subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def by_trl(trainer: str, config: str | Path = "bundle/config.yaml") -> list[str]:
    """Return TRL's own command for a configuration."""
    return [str(Path(sys.executable).with_name("trl")), trainer, "--config", str(config)]


def by_script(script: str | Path = "bundle/train.py") -> list[str]:
    """Return the command of a script that was handed over."""
    return [sys.executable, str(script)]


def train(line: Sequence[str], folder: Path, *more: str, may_abort_at_exit: bool = False) -> str:
    """Run two steps of a training in a folder; it has to end well. Return what it printed.

    Args:
        may_abort_at_exit: whether a thread may still run when a process exits: seen of a rank with gloo, after the
            training.
    """
    line = [*line, "--max_steps", "2", "--report_to", "none", *more]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    aborted = may_abort_at_exit and ABORTED_AT_EXIT in done.stderr
    assert done.returncode == 0 or aborted, done.stderr[-3000:]
    return done.stdout


def checkout(root: Path, files: Mapping[str, str]) -> Path:
    """Copy the package and its tests to a folder, with some files more, by their paths."""
    for name in ("autotune", "search_spaces", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for path, text in files.items():
        (root / path).write_text(text.lstrip(), encoding="utf-8")
    return root


def start(*words: str | Path, folder: Path) -> subprocess.Popen[str]:
    """Start ``autotune`` in a folder and in a process group of its own."""
    line, environment = command(*words)
    return subprocess.Popen(
        line,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def descendants(pid: int) -> list[psutil.Process]:
    """Return the processes that a process started, and those that these started."""
    return psutil.Process(pid).children(recursive=True)


def until(holds: Callable[[], bool], running: subprocess.Popen[str], seconds: float = 300) -> None:
    """Wait until something holds, while a command runs."""
    end = time.monotonic() + seconds
    while not holds():
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
