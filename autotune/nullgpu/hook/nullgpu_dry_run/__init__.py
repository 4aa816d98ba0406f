"""Loaded by a dry run into the processes of a training script: follows their steps, and ends them after some.

The parent (``autotune/nullgpu/command.py``) names a folder in ``AUTOTUNE_DRY_RUN``; ``request.json`` in it says what is
wanted. Each process that uses CUDA keeps ``process-PID.json`` there, written anew at every change; its fields are those
of ``Followed`` in ``autotune/core/dry_run.py``. A rank whose steps are done leaves ``stopped-RANK``, and the last of
them ``all-stopped``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

FOLDER = "AUTOTUNE_DRY_RUN"


def hook() -> None:
    """Follow this process in a dry run; PyTorch calls this at the end of ``import torch``."""
    folder = os.environ.get(FOLDER)
    request = Path(folder or "", "request.json")
    if folder and request.is_file():
        from .followed import Followed

        Followed(request.parent, json.loads(request.read_text(encoding="utf-8"))).follow()
