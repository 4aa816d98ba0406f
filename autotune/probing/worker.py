"""A process that runs one job after another: only the first one has to import and warm up."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from autotune.core.protocol import COMMANDS_FIFO, EVENTS_FIFO
from autotune.probing.channel import Channel, ChannelClosed
from autotune.probing.server import JobExit, JobServer, send_request

# Between two looks whether the server that is to fork the process has ended.
_INTERVAL_SECONDS = 0.25


class Worker(Channel):
    """A process forked from a job server, for jobs in parallel to the server's own. It ends with the server.

    A job that fails may leave it in a bad state, and it is up to the caller to close it then. After a time-out, or if
    its process has ended, it runs no further job.

    Args:
        server: the server, which may still be starting.
        folder: a new folder, for the named pipes by which it gets commands and sends events. They are opened before the
            process that uses their other ends exists.

    Attributes:
        jobs: the number of jobs that it has run.

    Raises:
        ProbeServerError: the server could not be started, or died and could not be replaced.
    """

    def __init__(self, server: JobServer, folder: Path) -> None:
        folder.mkdir(parents=True)
        for name in (COMMANDS_FIFO, EVENTS_FIFO):
            os.mkfifo(folder / name, 0o600)
        # For reading too: a pipe without a reader cannot be opened for writing without waiting.
        commands = os.open(folder / COMMANDS_FIFO, os.O_RDWR | os.O_CLOEXEC)
        super().__init__(commands, os.open(folder / EVENTS_FIFO, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        self._server = server
        self._folder = folder
        self._interrupted = False
        self.jobs = 0
        self._forked_by = server.fork(folder)

    def run(self, job: str, request: object, folder: Path, timeout_seconds: float | None = None) -> JobExit:
        """Run a job in ``folder`` and wait for its end.

        Args:
            timeout_seconds: time after which the process is killed, from the start of the job; None: never.

        Raises:
            InputError: the folder cannot be written, or the disk is full.
            ProbeServerError: the server died before it forked the process, and could not be replaced.
        """
        sent_seconds = send_request(job, request, folder)
        try:
            while not self.ready:
                if self.receive(_INTERVAL_SECONDS) is None:
                    self._require_server()
            self.send(start=str(folder.resolve()))
            ended = self.receive(timeout_seconds)
        except ChannelClosed:
            self._close_pipes()
            return JobExit(time.monotonic() - sent_seconds, server_died=True)
        self.jobs += 1
        self._server.job_completed()
        if ended is None:
            self.close()
            return JobExit(time.monotonic() - sent_seconds, timed_out=True)
        return JobExit(time.monotonic() - sent_seconds, code=ended["code"])

    def _require_server(self) -> None:
        """Fork the process from a new server if the former one ended first.

        Raises:
            ChannelClosed: this worker was interrupted, or the server closed.
        """
        if self._interrupted or self._server.pid is None:
            raise ChannelClosed
        if not self._forked_by.is_running:
            self._forked_by = self._server.fork(self._folder)

    def interrupt(self) -> None:
        """Kill the process; for another thread than the one that waits for a job."""
        self._interrupted = True
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process, with every process that it started."""
        self.interrupt()
        self._close_pipes()

    def _close_pipes(self) -> None:
        """Close the pipes, at whose end the process ends if it is not ready yet."""
        if self._events >= 0:
            for pipe in (self._commands, self._events):
                os.close(pipe)
            self._commands = self._events = -1
            self.pid = None
