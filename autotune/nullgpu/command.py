"""Runs a training command on null GPUs and reads the records of its processes (``hook/nullgpu_dry_run/``)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from autotune.core.documents.dry_run import CommandExit, ProcessRecord, UnsupportedCall
from autotune.core.files.codec import decode
from autotune.errors import InputError
from autotune.inspection.command_line import ASSIGNMENT
from autotune.nullgpu.devices import NullDevice
from autotune.nullgpu.environment import environment
from autotune.nullgpu.hook.nullgpu_dry_run import FOLDER
from autotune.nullgpu.interpreter import interpreter, library_folder

_POLL_SECONDS = 0.1
# Time for the launcher to notice that its ranks have ended; a script that continues after training is ended then.
_GRACE_SECONDS = 20.0
_KILL_SECONDS = 5.0
# The file descriptor, since sys.stderr may be replaced by an object without one.
_STDERR = 2
# Experiment trackers must not report a dry run.
_TRACKERS = {"WANDB_MODE": "disabled", "COMET_MODE": "DISABLED"}


@dataclass(frozen=True)
class CommandResult:
    """The ending of a command and the records of its processes.

    Attributes:
        processes: the processes that loaded PyTorch and used a GPU or failed, by rank.
        refused: the calls of functions that null GPUs refuse.
    """

    ending: CommandExit
    processes: tuple[ProcessRecord, ...]
    refused: tuple[UnsupportedCall, ...]


def run(
    command: Sequence[str],
    device: NullDevice,
    count: int,
    folder: Path,
    *,
    steps: int,
    as_shuffled: bool,
    timeout_seconds: float | None,
) -> CommandResult:
    """Run a command on null GPUs with its output on stderr.

    Args:
        folder: empty folder for the records of its processes.
        steps: optimizer steps after which its processes end.
        as_shuffled: keep the script's own order of rows, instead of the largest first.

    Raises:
        InputError: the command cannot be started, or its environment lacks a requirement of null GPUs.
        AutotuneError: the library of the null GPUs could not be built.
    """
    python = interpreter(command, os.environ)
    variables = environment(device, count=count, table=folder / "table", folder=library_folder(python, os.environ))
    (folder / "request.json").write_text(json.dumps({"steps": steps, "as_shuffled": as_shuffled}), encoding="utf-8")
    variables |= {**_TRACKERS, FOLDER: str(folder), "NULLGPU_REFUSED": str(folder / "refused")}
    words = ["env", *command] if ASSIGNMENT.fullmatch(command[0]) else list(command)
    try:
        process = subprocess.Popen(
            words, env=variables, stdin=subprocess.DEVNULL, stdout=_STDERR, start_new_session=True
        )
    except OSError as error:
        hint = "Give a program on PATH, or its path."
        raise InputError(f"{command[0]} cannot be started: {error.strerror}.", hint=hint) from error
    try:
        ending = _wait(process, folder, timeout_seconds)
    finally:
        _terminate(process)
        # A progress bar does not end its line.
        sys.stderr.write("\n")
    return CommandResult(ending, tuple(_followed(folder)), tuple(_refused(folder / "refused")))


def _wait(process: subprocess.Popen[bytes], folder: Path, timeout_seconds: float | None) -> CommandExit:
    began = time.monotonic()
    stopped: float | None = None
    while (code := process.poll()) is None:
        now = time.monotonic()
        if timeout_seconds is not None and now - began > timeout_seconds:
            return CommandExit(None, timed_out=True)
        if stopped is None and (folder / "all-stopped").exists():
            stopped = now
        if stopped is not None and now - stopped > _GRACE_SECONDS:
            return CommandExit(0)
        time.sleep(_POLL_SECONDS)
    return CommandExit(code) if code >= 0 else CommandExit(None, -code)


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """End the command's process group and its descendants: launchers start ranks in new sessions."""
    children = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        for each in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_SECONDS)
        _, children = psutil.wait_procs(children, _KILL_SECONDS)


def _followed(folder: Path) -> list[ProcessRecord]:
    files = folder.glob("process-*.json")
    found = (decode(ProcessRecord, json.loads(file.read_text(encoding="utf-8"))) for file in files)
    return sorted(found, key=lambda each: (each.rank, each.pid))


def _refused(file: Path) -> Iterator[UnsupportedCall]:
    if file.is_file():
        lines = dict.fromkeys(file.read_text(encoding="utf-8").splitlines())
        yield from (UnsupportedCall(*line.split("\t", 1)) for line in lines)
