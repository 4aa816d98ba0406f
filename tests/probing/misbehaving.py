"""Probes with every kind of misbehaviour, which the plan's trainer selects."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from autotune.core.jobs.protocol import RANK_FOLDER, REPLY_FILE, Job, ProbeRequest
from autotune.core.measurement import Measurement, Schedule
from autotune.core.plan import TrainingPlan
from autotune.core.status import ProbeStatus
from autotune.core.workload import ModelSource
from autotune.step.job import JobContext

MODULE = "tests.probing.misbehaving"
PIDS_FILE = "pids.json"
PROGRAM_FILE = "program"


def request(behaviour: str, limit_bytes: int | None = None) -> ProbeRequest:
    """Return the request for a probe that behaves so."""
    return ProbeRequest(TrainingPlan(behaviour), ModelSource("none"), "cpu", "none", Schedule(), limit_bytes)


def misbehave(request: ProbeRequest, context: JobContext) -> Measurement:
    """Misbehave in the way that the plan's trainer names."""
    globals()[f"_{request.plan.trainer}"](context.folder)
    return Measurement(ProbeStatus.OK)


JOBS = {Job.PROBE: misbehave}


def _behave(folder: Path) -> None:
    pass


def _name_its_program(folder: Path) -> None:
    (folder / PROGRAM_FILE).write_bytes(Path("/proc/self/cmdline").read_bytes())


def _print_noise(folder: Path) -> None:
    os.write(1, b'{"event": "exited", "code": 0, "signal": null}\n')
    sys.stdout.write('{"event": "ready"}\n' * 10_000)


def _hang(folder: Path) -> None:
    """Start a process that starts a process, say who they are, and sleep; none heeds a polite request to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    script = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    pids = folder / PIDS_FILE
    pids.with_suffix(".new").write_text(json.dumps([os.getpid(), child.pid, grandchild]))
    pids.with_suffix(".new").replace(pids)
    time.sleep(600)


def _leave_a_process_behind(folder: Path) -> None:
    (folder / PIDS_FILE).write_text(json.dumps([subprocess.Popen(["sleep", "600"]).pid]))


def _kill_itself(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_itself_at_first(folder: Path) -> None:
    first = folder.with_suffix(".first")
    if not first.exists():
        first.touch()
        _kill_itself(folder)


def _kill_rank_0(folder: Path) -> None:
    if folder.name == RANK_FOLDER.format(rank=0):
        _kill_itself(folder)


def _kill_rank_0_at_first(folder: Path) -> None:
    if folder.name == RANK_FOLDER.format(rank=0):
        _kill_itself_at_first(folder)


def _kill_the_server(folder: Path) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def _exit_with_3(folder: Path) -> None:
    sys.stderr.write("the last words\n")
    sys.exit(3)


def _exit_without_reply(folder: Path) -> None:
    os._exit(0)


def _remove_its_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def _print_garbage(folder: Path) -> None:
    (folder / REPLY_FILE).write_bytes(b"\x00\xff garbage")
    os._exit(0)


def _reply_without_a_document(folder: Path) -> None:
    (folder / REPLY_FILE).write_text("[]")
    os._exit(0)


def _reply_in_another_shape(folder: Path) -> None:
    (folder / REPLY_FILE).write_text('{"kind": "reply", "body": {"measurement": {"status": "splendid"}}}')
    os._exit(0)


def _raise(folder: Path) -> None:
    raise ArithmeticError("two and two are five")


def _fill_the_disk(folder: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fail_to_allocate_in_cpp(folder: Path) -> None:
    """Run out of memory under a limit, in C++ code without a handler."""
    resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
    allocate = ctypes.CDLL("libstdc++.so.6")["_Znwm"]  # operator new
    allocate(ctypes.c_size_t(2**40))


def _abort(folder: Path) -> None:
    os.abort()
