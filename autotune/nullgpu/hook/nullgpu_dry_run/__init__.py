"""PyTorch plug-in of a dry run: records the memory of a training script's processes and ends them after some steps.

Protocol: the parent (``autotune/nullgpu/command.py``) sets ``AUTOTUNE_DRY_RUN`` to a folder with ``request.json``; its
fields are ``steps`` and ``as_shuffled``. Each process that uses CUDA rewrites ``process-PID.json`` there at every
change; its fields are those of ``ProcessRecord`` in ``autotune/core/documents/dry_run.py``. A rank that has taken its
steps writes ``stopped-RANK``, and the last rank ``all-stopped``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

FOLDER = "AUTOTUNE_DRY_RUN"


def hook() -> None:
    """Start recording if this is a process of a dry run; PyTorch calls this at the end of ``import torch``."""
    folder = os.environ.get(FOLDER)
    request = Path(folder or "", "request.json")
    if folder and request.is_file():
        from .recorder import ProcessRecorder

        ProcessRecorder(request.parent, json.loads(request.read_text(encoding="utf-8"))).follow()
