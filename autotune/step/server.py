"""The job server: preloads the libraries once, then starts one process per job and never runs one itself."""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autotune.step.child import execute, offered_jobs, redirect_output
from autotune.step.imports import accelerator_is_initialized, preload, preload_early
from autotune.step.job import JobType
from autotune.step.process import die_with, kill_group

# Interval of checks for a lost parent, needed where another process still holds the other end of standard input.
_PARENT_CHECK_SECONDS = 1.0
# A scheduler may send these to every process of a job. This one ends with its parent, which ends a probe in order.
_ASKING = tuple(
    number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN
)


class Server:
    """Serves one parent, one job at a time. See :mod:`autotune.step.__main__` for the protocol.

    Args:
        arguments: of ``python -m autotune.step``, for jobs that need an interpreter of their own.
        twins: sockets; for each, a copy of this server is forked that serves there.
        early: whether the first job may start before all is imported.
    """

    def __init__(
        self,
        arguments: list[str],
        *,
        device: str,
        spawn: bool,
        jobs_module: str | None,
        twins: Sequence[int] = (),
        early: bool = False,
    ) -> None:
        self._device = device
        self._twins = twins
        self._early = early
        self._whole = False
        self._spawn = spawn
        self._jobs_module = jobs_module
        self._arguments = arguments
        self._parent = os.getppid()
        self._running: int | None = None
        # Output of libraries must not mix with the events.
        self._events = os.dup(1)
        os.dup2(2, 1)

    def serve(self) -> int:
        """Serve until standard input ends or the parent is gone; return the exit status."""
        (preload_early if self._early else partial(preload, self._device))()
        jobs = offered_jobs(self._jobs_module)
        # Jobs on a CPU use no CUDA: bitsandbytes, which peft imports, may have initialised it.
        self._spawn = self._spawn or (self._device == "cuda" and accelerator_is_initialized())
        try:
            self._be_woken()
            self._tell(event="ready", pid=os.getpid())
            self._listen(jobs)
        except BrokenPipeError:
            return 1
        finally:
            if self._running is not None:
                kill_group(self._running)
                os.waitpid(self._running, 0)
        return 0

    def _complete(self) -> None:
        """Import what is not imported yet, and fork the twins."""
        if self._early:
            preload(self._device)
        self._whole = True
        server = os.getpid()
        for socket in self._twins:
            if not os.fork():
                die_with(server)
                self._parent, self._running = server, None
                os.dup2(socket, 0)
                os.dup2(socket, self._events, inheritable=False)
                self._be_woken()
                self._tell(event="ready", pid=os.getpid())
                break
        for socket in self._twins:
            os.close(socket)

    def _be_woken(self) -> None:
        """Make ``self._woken`` readable at the end of a child process."""
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, _wake)
        self._awaited = selectors.PollSelector()
        for file in (0, self._woken):
            self._awaited.register(file, selectors.EVENT_READ)
        for asking in _ASKING:
            signal.signal(asking, signal.SIG_IGN)

    def _listen(self, jobs: Mapping[str, JobType]) -> None:
        unread = b""
        while os.getppid() == self._parent:
            readable = [key.fd for key, _ in self._awaited.select(_PARENT_CHECK_SECONDS)]
            if self._woken in readable:
                os.read(self._woken, 4096)
                self._reap()
            if 0 in readable:
                received = os.read(0, 65536)
                if not received:
                    return
                *lines, unread = (unread + received).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line), jobs)
            if not self._whole and (self._running is not None or not readable):
                self._complete()

    def _obey(self, command: dict[str, Any], jobs: Mapping[str, JobType]) -> None:
        if "start" in command:
            folder = Path(command["start"])
            self._running = self._spawned(folder) if self._spawn else self._forked(folder, jobs)
            self._tell(event="started", pid=self._running)
        elif self._running is not None:
            kill_group(self._running)
        else:
            self._tell(event="idle")

    def _forked(self, folder: Path, jobs: Mapping[str, JobType]) -> int:
        server = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, *_ASKING):
                signal.signal(number, signal.SIG_DFL)
            die_with(server)
            os.close(self._events)
            redirect_output(folder)
            status = execute(folder, jobs, self._arguments)
        except BaseException:  # noqa: BLE001 the forked process must not return into the server's loop
            traceback.print_exc()
        finally:
            os._exit(status)

    def _spawned(self, folder: Path) -> int:
        arguments = [sys.executable, "-P", "-m", "autotune.step", *self._arguments]
        arguments += ["--parent", str(os.getpid()), "--once", str(folder)]
        return os.posix_spawn(sys.executable, arguments, os.environ, setsid=True, setsigdef=[signal.SIGCHLD, *_ASKING])

    def _reap(self) -> None:
        """Report the end of the running job, after killing the rest of its process group."""
        if self._running is None:
            return
        ended = os.waitid(os.P_PID, self._running, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return
        # The leader is not reaped yet, so its group id cannot have been reused.
        kill_group(self._running)
        _, status = os.waitpid(self._running, 0)
        self._running = None
        code = os.waitstatus_to_exitcode(status)
        self._tell(event="exited", code=code if code >= 0 else None, signal=-code if code < 0 else None)

    def _tell(self, **event: object) -> None:
        os.write(self._events, json.dumps(event).encode() + b"\n")


def _wake(*_: object) -> None:
    """Handle a signal, so that Python writes it to the wake-up pipe."""
