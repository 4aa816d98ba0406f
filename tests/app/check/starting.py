"""Launches of commands as accelerate's own launcher reads them, in this process, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotune.core.configuration import ReadCommand
from autotune.inspection.command_line import ACCELERATE, TRL
from autotune.step.jobs.accelerate_launch import launched
from autotune.step.jobs.read_command import _resolved
from autotune.userconfig.written import Written


def read_by_accelerate(
    written: Written, keys: Mapping[str, object] | None = None, gpus: int = 1, default: Path | None = None
) -> ReadCommand:
    """Return what is read of a launch, and nothing of the training.

    Args:
        keys: the keys of a file that ``trl`` hands on.
    """
    command, handed = written.command, {name: str(value) for name, value in (keys or {}).items()}
    words = [word for name, value in handed.items() for word in (f"--{name}", value)]
    if command.launcher == ACCELERATE:
        return ReadCommand(launch=handed, launched=launched(command.launch, gpus, str(default or "")))
    if command.launcher == TRL:
        return ReadCommand(launch=handed, launched=launched(_resolved(words), gpus, str(default or "")))
    return ReadCommand(launch=handed)
