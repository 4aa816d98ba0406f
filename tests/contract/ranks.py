"""A training by DeepSpeed's real engine on the CPU, as the only rank of its group, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def trained_alone(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script that calls :func:`alone` before it builds a trainer."""
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    settings = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **group, **settings},
    )


def alone(folder: Path) -> None:
    """Initialise a group of this process alone, whose members meet in a file."""
    import deepspeed

    # Compiled in minutes otherwise; without it, DeepSpeed communicates by the group.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
