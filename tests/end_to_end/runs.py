"""Running the command line in processes of its own, as a user does, with a quick effort that is quicker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]


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


def train_with_trl(trainer: str, folder: Path) -> None:
    """Run two steps of TRL's own command by the configuration in the folder's bundle; it has to end well."""
    line = [str(Path(sys.executable).with_name("trl")), trainer, "--config", "bundle/config.yaml"]
    more = ["--max_steps", "2", "--report_to", "none"]
    done = subprocess.run([*line, *more], cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


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
