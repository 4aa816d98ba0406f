"""Runs a training command on null GPUs and reads what its processes wrote down (``hook/nullgpu_dry_run/``)."""

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

from autotune.core.codec import decode
from autotune.core.dry_run import CommandExit, Followed, Refused
from autotune.errors import InputError
from autotune.inspection.command_line import ASSIGNMENT
from autotune.nullgpu.devices import NullDevice
from autotune.nullgpu.environment import environment
from autotune.nullgpu.hook.nullgpu_dry_run import FOLDER
from autotune.nullgpu.interpreter import interpreter, library

_GLANCE_SECONDS = 0.1
# A launcher looks after its ranks every so often; a script that goes on by itself after a training is not waited for.
_GRACE_SECONDS = 20.0
_KILL_SECONDS = 5.0
# Where the standard error of this process goes, whatever Python has put in the place of its own.
_STDERR = 2
# A dry run is none to be reported.
_TRACKERS = {"WANDB_MODE": "disabled", "COMET_MODE": "DISABLED"}


@dataclass(frozen=True)
class Ran:
    """A command that ended.

    Attributes:
        processes: those in which PyTorch was loaded and that used a GPU or failed, by rank.
    """

    ending: CommandExit
    processes: tuple[Followed, ...]
    refused: tuple[Refused, ...]


def run(
    command: Sequence[str],
    device: NullDevice,
    count: int,
    folder: Path,
    *,
    steps: int,
    as_shuffled: bool,
    timeout_seconds: float | None,
) -> Ran:
    """Run a command on null GPUs with its output on stderr; return its ending and its processes' records.

    Args:
        folder: empty; what its processes write lies there.
        steps: optimizer steps after which its processes end.
        as_shuffled: whether rows come in the script's own order.

    Raises:
        InputError: it cannot be started, or its environment lacks something that null GPUs need.
        AutotuneError: the library of the null GPUs could not be built.
    """
    python = interpreter(command, os.environ)
    variables = environment(device, count=count, table=folder / "table", folder=library(python, os.environ))
    (folder / "request.json").write_text(json.dumps({"steps": steps, "as_shuffled": as_shuffled}), encoding="utf-8")
    variables |= {**_TRACKERS, FOLDER: str(folder), "NULLGPU_REFUSED": str(folder / "refused")}
    words = ["env", *command] if ASSIGNMENT.fullmatch(command[0]) else list(command)
    try:
        process = subprocess.Popen(
            words, env=variables, stdin=subprocess.DEVNULL, stdout=_STDERR, start_new_session=True
        )
    except OSError as error:
        raise InputError(f"{command[0]} cannot be started: {error.strerror}.") from error
    try:
        ending = _awaited(process, folder, timeout_seconds)
    finally:
        _end(process)
        # What the script drew last, such as a bar, need not have ended its line.
        sys.stderr.write("\n")
    return Ran(ending, tuple(_followed(folder)), tuple(_refused(folder / "refused")))


def _awaited(process: subprocess.Popen[bytes], folder: Path, timeout_seconds: float | None) -> CommandExit:
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
        time.sleep(_GLANCE_SECONDS)
    return CommandExit(code) if code >= 0 else CommandExit(None, -code)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the command: launchers give their ranks sessions of their own."""
    left = []
    with contextlib.suppress(psutil.NoSuchProcess):
        left = psutil.Process(process.pid).children(recursive=True)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_SECONDS)
        _, left = psutil.wait_procs(left, _KILL_SECONDS)


def _followed(folder: Path) -> list[Followed]:
    files = folder.glob("process-*.json")
    found = (decode(Followed, json.loads(file.read_text(encoding="utf-8"))) for file in files)
    return sorted(found, key=lambda each: (each.rank, each.pid))


def _refused(file: Path) -> Iterator[Refused]:
    if file.is_file():
        lines = dict.fromkeys(file.read_text(encoding="utf-8").splitlines())
        yield from (Refused(*line.split("\t", 1)) for line in lines)
