"""Starts processes of this package, and exchanges commands and events with them over connections."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import site
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import IO, Any

from autotune.errors import ProbeServerError

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_SERVER = "autotune.step"
_CLOSING_SECONDS = 10.0
STACK = "Stack (most recent call first):"
"""The line above a stack that Python's ``faulthandler`` writes."""
# The stack of a nested import has a hundred lines.
_OUTPUT_BYTES = 32768
# Maximum single wait: if this process is suspended, at most this much of the suspension counts towards a time limit.
_WAIT_SECONDS = 1.0
_NO_PROGRAM = (errno.ENOENT, errno.EACCES, errno.ENOEXEC)
# Variables with which torchrun, accelerate and DeepSpeed pass a process its rank and its engine
# (torch/distributed/elastic/agent, accelerate 1.15 ``utils/launch.py``); and those of MPI launchers, by which
# accelerate considers a process on a CPU part of a group (``state.py``).
_LAUNCHER_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "CROSS_RANK",
    "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_LAUNCHER_PREFIXES = (
    "ROLE_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "PMI_", "PMIX_", "OMPI_",
    "MV2_", "MPI_LOCAL",
)  # fmt: skip


class ChannelClosed(Exception):  # noqa: N818 an event, signalled by an exception
    """The process at the other end has ended."""


class Channel:
    """Connection to a process that carries commands and events, which are dictionaries.

    Args:
        end: this process's end.

    Attributes:
        ready: whether the process has sent the event ``ready``.
        pid: its process id; None before the event ``ready``, after the event ``ended``, and after :meth:`disconnect`.
    """

    def __init__(self, end: Connection) -> None:
        self._end = end
        self.ready = False
        self.pid: int | None = None

    def send(self, **command: object) -> None:
        """Send a command.

        Raises:
            ChannelClosed: the process has ended.
        """
        try:
            self._end.send(command)
        except OSError as error:
            raise ChannelClosed from error

    def receive(self, timeout_seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next event, or None after the time-out.

        Time in which this process is suspended, as by a scheduler, does not count.

        Raises:
            ChannelClosed: the process has ended, or the channel is closed.
        """
        remaining_seconds = math.inf if timeout_seconds is None else timeout_seconds
        try:
            while not self._end.poll(wait_seconds := min(remaining_seconds, _WAIT_SECONDS)):
                remaining_seconds -= wait_seconds
                if remaining_seconds <= 0:
                    return None
            event: dict[str, Any] = self._end.recv()
        except (EOFError, OSError) as error:
            raise ChannelClosed from error
        if event["event"] == "ready":
            self.ready, self.pid = True, event["pid"]
        elif event["event"] == "ended":
            self.pid = None
        return event

    def kill(self) -> None:
        """Kill the process group, unless the event ``ended`` was received."""
        # Another thread may receive that event concurrently.
        if (pid := self.pid) is not None:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)

    def disconnect(self) -> None:
        """Close this end of the connection; an idle process then exits."""
        self.pid = None
        self._end.close()


def child_environment(additional: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child: this process's, without a launcher's variables, plus additional ones.

    This process may be a rank of a process group; its children are not.
    """
    installed = {Path(folder).resolve() for folder in (*site.getsitepackages(), site.getusersitepackages())}
    # Of PYTHONPATH, site-packages would come before the standard library, which packages there can hide.
    added = [] if _PACKAGE_ROOT in installed else [str(_PACKAGE_ROOT)]
    paths = [*added, *filter(None, [os.environ.get("PYTHONPATH")])]
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    variable = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    return {**inherited, **additional, **variable}


def start_module(
    module: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], Connection, IO[bytes]]:
    """Start ``python -m MODULE`` in a new session.

    Args:
        arguments: words of its command line.
        environment: variables in addition to those of this process.

    Returns:
        The process, this end of the connection that is its standard input, and the file of its output.

    Raises:
        ProbeServerError: this process's Python was removed, or cannot be executed.
    """
    output = tempfile.TemporaryFile()  # noqa: SIM115 lives as long as the process
    ours, theirs = Pipe()
    with theirs:
        try:
            process = subprocess.Popen(
                # -P: a datasets.py or trl/ in the user's working directory must not be imported instead of the library.
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                env=child_environment(environment),
                start_new_session=True,
            )
        except OSError as error:
            if error.errno not in _NO_PROGRAM:
                raise
            raise ProbeServerError(
                f"The Python that runs autotune, {sys.executable}, cannot be started: {error.strerror}.",
                hint="Probes and traces are processes of it: repair its environment, or install autotune in another.",
            ) from error
    return process, ours, output


class ServerProcess(Channel):
    """A job server process, which starts processes for jobs."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start ``python -m autotune.step`` without waiting until it is ready; see :func:`start_module`."""
        self._process, end, self._output = start_module(_SERVER, arguments, environment)
        super().__init__(end)
        self.pid = self._process.pid

    def start(self, timeout_seconds: float) -> Channel | None:
        """Request a new process for jobs from the server; return the connection to it, or None after the time-out.

        Raises:
            ChannelClosed: the server has ended.
        """
        ours, theirs = Pipe()
        with theirs:
            try:
                send_handle(self._end, theirs.fileno(), self._process.pid)
            except OSError as error:
                ours.close()
                raise ChannelClosed from error
        process = Channel(ours)
        return process if process.receive(timeout_seconds) is not None else None

    def status(self) -> int | None:
        """Wait 10 s for the server's end; return its exit status, negative for a signal, or None after the time-out."""
        try:
            return self._process.wait(_CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> str:
        """End the server and return the end of its output."""
        if not self.ready:
            # The server is still importing. It has no jobs yet, and would end only after the imports.
            self._process.kill()
        self.disconnect()
        if self.status() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            # A process that waits for a file system or a driver may not even end when it is killed.
            self.status()
        with self._output as output:
            return read_tail(output, _OUTPUT_BYTES)

    def write_stack(self) -> None:
        """Let a server that is still importing write its stack to its output, below :data:`STACK`."""
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_WAIT_SECONDS)


def signal_name(number: int | None) -> str:
    """Return the name of a signal."""
    return next((each.name for each in signal.Signals if each == number), "a real-time signal")


def read_tail(file: IO[bytes], max_bytes: int = 4000) -> str:
    """Return the last bytes of a file as text, without moving the file position, which processes share."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), max_bytes, max(0, size - max_bytes)).decode(errors="replace").strip()
