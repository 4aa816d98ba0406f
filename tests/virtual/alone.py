"""Runs a script in a process of its own, which sees no GPU: the device of a trace stays registered in its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def found_by(script: str, *arguments: str) -> Any:
    """Return what a script prints last, read as JSON."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=900)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])
