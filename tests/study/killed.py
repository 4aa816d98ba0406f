"""Kills a search during one of its runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path


def kill_in_the_middle(url: str, log: Path, call: int) -> list[str]:
    """Run a search in a process, kill it while the given probe runs, and return a line for each probe it began."""
    command = [sys.executable, "-m", "tests.study.crashing_search", url, str(log), str(call)]
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + 240
        while not (log.exists() and log.read_text().count("\n") == call):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    return log.read_text().splitlines()
