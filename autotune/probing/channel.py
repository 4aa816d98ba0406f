"""Starts processes that run modules of this package, and exchanges commands and events with job servers."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_SERVER = "autotune.step"
_CLOSING_SECONDS = 10.0
# Maximum single wait: if this process is suspended, at most this much of the suspension counts towards a time limit.
_WAIT_SECONDS = 1.0
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
    """A connection to a process: commands to it and events from it, one JSON object per line.

    Args:
        end: this process's end, a stream socket.

    Attributes:
        ready: whether the process has reported that it accepts commands.
        pid: its process id; None until it is known, after its end was reported, and after :meth:`disconnect`.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._unread = b""
        self.ready = False
        self.pid: int | None = None

    def send(self, **command: object) -> None:
        """Send a command.

        Raises:
            ChannelClosed: the process has ended.
        """
        try:
            self._end.sendall(json.dumps(command).encode() + b"\n")
        except OSError as error:
            raise ChannelClosed from error

    def receive(self, timeout_seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next event, or None after the time-out.

        A scheduler that suspends a job stops all of its processes; this time does not count.

        Raises:
            ChannelClosed: the process has ended, or the channel is closed.
        """
        left = math.inf if timeout_seconds is None else timeout_seconds
        while b"\n" not in self._unread:
            wait_seconds, began = min(left, _WAIT_SECONDS), time.monotonic()
            try:
                self._end.settimeout(wait_seconds)
                received = self._end.recv(65536)
            except (TimeoutError, BlockingIOError):
                left -= wait_seconds
                if left <= 0:
                    return None
                continue
            except OSError as error:
                raise ChannelClosed from error
            if not received:
                raise ChannelClosed
            left -= min(wait_seconds, time.monotonic() - began)
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "ready":
            self.ready, self.pid = True, event["pid"]
        elif event["event"] == "ended":
            self.pid = None
        return event

    def kill(self) -> None:
        """Kill the process group, unless the end of the process was reported."""
        # Another thread may receive the report concurrently.
        if (pid := self.pid) is not None:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)

    def disconnect(self) -> None:
        """Close this end of the socket; an idle process then exits."""
        self.pid = None
        self._end.close()


def environment_of(further: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with further variables, for a process that runs a module of this package.

    Launcher variables are removed: this process may be a rank of a group, its children are not.
    """
    paths = [str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    outside = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHER_VARIABLES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    return {**outside, **further, "PYTHONPATH": os.pathsep.join(paths)}


def started(
    module: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket, IO[bytes]]:
    """Start a process that runs a module of this package, in a session of its own.

    Args:
        arguments: of its command line.
        environment: variables in addition to those of this process.

    Returns:
        The process, this end of the socket that is its standard input, and the file that receives its output.
    """
    output = tempfile.TemporaryFile()  # noqa: SIM115 lives as long as the process
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            # -P: a datasets.py or trl/ in the user's working directory must not be imported instead of the library.
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=theirs.fileno(),
            stdout=output,
            stderr=output,
            env=environment_of(environment),
            start_new_session=True,
        )
    return process, ours, output


class Started(Channel):
    """A server that was started as a process of its own."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start ``python -m autotune.step``, see :func:`started`; does not wait until it is ready."""
        self._process, end, self._output = started(_SERVER, arguments, environment)
        super().__init__(end)
        self.pid = self._process.pid

    def start(self) -> Channel:
        """Have the server start a process for jobs, and return the connection to it.

        Raises:
            ChannelClosed: the server has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._end, [b"."], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise ChannelClosed from error
        process = Channel(ours)
        while not process.ready:
            process.receive()
        return process

    def status(self) -> int | None:
        """Return the exit status of a server that has ended, negative for a signal; None if it is unknown."""
        try:
            return self._process.wait(_CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> str:
        """End the server and return the end of what it has printed."""
        if not self.ready:
            # It is still importing: there is no job to end, and an orderly shutdown would wait for the imports.
            self._process.kill()
        self.disconnect()
        try:
            self._process.wait(_CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with self._output as output:
            return end_of(output)


def signal_name(number: int | None) -> str:
    """Return the name of a signal."""
    return next((known.name for known in signal.Signals if known == number), "a real-time signal")


def end_of(file: IO[bytes], most_bytes: int = 4000) -> str:
    """Return the end of a file, without a change of the shared file position."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), most_bytes, max(0, size - most_bytes)).decode(errors="replace").strip()
