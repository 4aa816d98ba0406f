"""Parses commands with accelerate's own launcher in this process, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from autotune.core.configuration import ReadCommand
from autotune.inspection.command_line import ACCELERATE, TRL, read_command_line
from autotune.inspection.yaml_file import parse_yaml
from autotune.step.jobs.accelerate_launch import read_launch
from autotune.step.jobs.read_command import _resolve_accelerate_config
from autotune.userconfig.launch import Launching, launching
from autotune.userconfig.written import WrittenConfig


def read_by_accelerate(written: WrittenConfig, keys: Mapping[str, object] | None = None, gpus: int = 1) -> ReadCommand:
    """Return what is read of a launch, and nothing of the training.

    Args:
        keys: the keys of a file that ``trl`` hands on.
    """
    command, default = written.command, str(written.default or "")
    handed = {name: str(value) for name, value in (keys or {}).items()}
    words = [word for name, value in handed.items() for word in (f"--{name}", value)]
    if command.launcher == ACCELERATE:
        return ReadCommand(launch=handed, launched=read_launch(command.launch, gpus, default))
    if command.launcher == TRL:
        return ReadCommand(launch=handed, launched=read_launch(_resolve_accelerate_config(words), gpus, default))
    return ReadCommand(launch=handed)


def started(words: str, script: str, gpus: int | None = None) -> Launching:
    """Return the launch of a script by the words of a launcher.

    Args:
        gpus: of this machine; None where it is not planned for.
    """
    command = read_command_line([*words.split(), script, "--config", "c.yaml"])
    written = WrittenConfig(command, None, "sft")
    return launching(written, read_by_accelerate(written, gpus=gpus or 1), gpus)


def with_keys(words: str, **keys: object) -> tuple[WrittenConfig, ReadCommand]:
    """Return a command with a file of such keys, as TRL's parser reads it."""
    file = parse_yaml(yaml.safe_dump(keys, sort_keys=False), Path("c.yaml"))
    written = WrittenConfig(read_command_line([*words.split(), "--config", "c.yaml"]), file, "sft")
    return written, read_by_accelerate(written, keys)
