"""Worker process: reads the request of each job, runs the job, and writes the reply."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import get_type_hints

from autotune.core.files.codec import decode
from autotune.core.jobs.exchange import read_request, write_reply
from autotune.core.jobs.protocol import LOG_FILE, InputProblem
from autotune.errors import InputError, UnreadError
from autotune.step.imports import import_libraries
from autotune.step.job import JobContext, JobFunction, failure_of, lacks_space


def job_functions(extra_module: str | None) -> Mapping[str, JobFunction]:
    """Return the job types by name, including those in the ``JOBS`` of another module."""
    from autotune.step.jobs import JOBS

    extra = importlib.import_module(extra_module).JOBS if extra_module is not None else {}
    return {**JOBS, **extra}


def run_worker(jobs_module: str | None) -> int:
    """Import the libraries and run the jobs that standard input names; return the exit status."""
    # Each job replaces standard input by the null device.
    connection = Connection(os.dup(0))
    import_libraries()
    return run_jobs(connection, job_functions(jobs_module))


def run_jobs(connection: Connection, jobs: Mapping[str, JobFunction]) -> int:
    """Run jobs in this process, one after another, until the connection ends; return the exit status.

    Args:
        connection: names the folders of the jobs; see :mod:`autotune.step.__main__`.
    """
    with suppress(EOFError):
        while True:
            command = connection.recv()
            folder = Path(command["start"])
            redirect_output(folder)
            execute(folder, jobs, command["env"])
            send_event(connection, event="done", code=0, signal=None)
    return 0


def send_event(connection: Connection, **event: object) -> None:
    """Send an event to the parent, which may have closed the connection."""
    with suppress(ConnectionError):
        connection.send(event)


def redirect_output(folder: Path) -> None:
    """Redirect standard output and error to the job's log, and standard input from the null device."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(folder / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(null)
    os.close(log)


def execute(folder: Path, jobs: Mapping[str, JobFunction], env: Mapping[str, str]) -> None:
    """Run the job in ``folder`` and write its reply or its error.

    Args:
        env: a launcher's environment variables for this rank; empty for a single process.
    """
    if env:
        os.environ.update(env)
    else:
        # Only the first GPU is visible: TRL refuses several in one process, and a single rank has one.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    try:
        envelope = read_request(folder)
        run = jobs[envelope["job"]]
        request_type, *_ = get_type_hints(run).values()
        context = JobContext(folder=folder, sent_seconds=envelope["sent_seconds"])
        reply = run(decode(request_type, envelope["body"]), context)
    except InputError as error:
        reply = InputProblem(error.message, error.hint, unread=isinstance(error, UnreadError))
    except Exception as error:  # noqa: BLE001 the process boundary: every error is reported to the parent
        reply = failure_of(error)
        if lacks_space(error):
            hint = f"Free some on the disks of {folder} and {tempfile.gettempdir()}, or raise a limit of file sizes "
            hint += "(ulimit -f), then run the command again."
            reply = InputProblem("There is no space left on a disk that a job writes to.", hint)
    write_reply(folder, reply)
    sys.stdout.flush()
    sys.stderr.flush()
