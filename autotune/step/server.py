"""The job server: preloads the libraries once, then starts processes for jobs and never runs one itself."""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from autotune.core.protocol import COMMANDS_FIFO, EVENTS_FIFO
from autotune.step.child import execute, offered_jobs, redirect_output
from autotune.step.imports import accelerator_is_initialized, preload
from autotune.step.job import JobType
from autotune.step.process import forked, kill_group, words_of_one_job

# Interval of checks for a lost parent, needed where another process still holds the other end of standard input.
_PARENT_CHECK_SECONDS = 1.0
# A scheduler may send these to every process of a job. This one ends with its parent, which ends a probe in order.
_TERMINATION_SIGNALS = tuple(
    number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN
)


class Server:
    """Serves one parent, one job at a time. See :mod:`autotune.step.__main__` for the protocol.

    Args:
        arguments: of ``python -m autotune.step``, for jobs that need an interpreter of their own.
    """

    def __init__(self, arguments: list[str], *, device: str, spawn: bool, jobs_module: str | None) -> None:
        self._device = device
        self._spawn = spawn
        self._jobs_module = jobs_module
        self._arguments = arguments
        self._parent = os.getppid()
        self._running: int | None = None
        self._copies: set[int] = set()
        # Output of libraries must not mix with the events.
        self._events = os.dup(1)
        os.dup2(2, 1)

    def serve(self) -> int:
        """Serve until standard input ends or the parent is gone; return the exit status."""
        preload(self._device)
        jobs = offered_jobs(self._jobs_module)
        # Jobs on a CPU use no CUDA: bitsandbytes, which peft imports, may have initialised it.
        self._spawn = self._spawn or (self._device == "cuda" and accelerator_is_initialized())
        try:
            self._open_wakeup_pipe()
            self._send_event(event="ready", pid=os.getpid())
            self._listen(jobs)
        except BrokenPipeError:
            return 1
        finally:
            for pid in (*self._copies, *filter(None, [self._running])):
                kill_group(pid)
                os.waitpid(pid, 0)
        return 0

    def _open_wakeup_pipe(self) -> None:
        """Make ``self._woken`` readable at the end of a child process."""
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, _handle_signal)
        self._awaited = selectors.PollSelector()
        for file in (0, self._woken):
            self._awaited.register(file, selectors.EVENT_READ)
        for number in _TERMINATION_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

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
                    self._handle(json.loads(line), jobs)

    def _handle(self, command: dict[str, Any], jobs: Mapping[str, JobType]) -> None:
        if "start" in command:
            folder, gate = Path(command["start"]), os.pipe()
            self._running = self._spawned(folder) if self._spawn else self._forked(folder, jobs, gate)
            self._send_event(event="started", pid=self._running)
            for end in gate:
                os.close(end)
        elif "fork" in command:
            self._copies.add(self._detached(partial(self._run_all, Path(command["fork"]), jobs)))
        elif self._running is not None:
            kill_group(self._running)
        else:
            self._send_event(event="idle")

    def _forked(self, folder: Path, jobs: Mapping[str, JobType], gate: tuple[int, int]) -> int:
        """Fork a job that begins when both ends of a pipe are closed here.

        Until its start was reported, a job that ends the server would be taken for one that was never started.
        """
        opened, held = gate

        def run() -> int:
            os.close(held)
            os.read(opened, 1)
            os.close(opened)
            redirect_output(folder)
            return execute(folder, jobs, self._arguments)

        return self._detached(run)

    def _run_all(self, pipes: Path, jobs: Mapping[str, JobType]) -> int:
        """Run jobs in this process, until its commands end."""
        # Both fail, instead of waiting, where the parent has closed its ends.
        commands = os.open(pipes / COMMANDS_FIFO, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(commands, True)
        self._events = os.open(pipes / EVENTS_FIFO, os.O_WRONLY | os.O_NONBLOCK)
        self._send_event(event="ready", pid=os.getpid())
        with os.fdopen(commands, encoding="utf-8") as lines:
            for line in lines:
                folder = Path(json.loads(line)["start"])
                redirect_output(folder)
                self._send_event(event="exited", code=execute(folder, jobs, self._arguments))
        return 0

    def _detached(self, run: Callable[[], int]) -> int:
        """Fork a process, with a group of its own, that runs a function and exits; return its process id."""

        def detached() -> int:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, *_TERMINATION_SIGNALS):
                signal.signal(number, signal.SIG_DFL)
            os.close(self._events)
            return run()

        return forked(detached)

    def _spawned(self, folder: Path) -> int:
        words = words_of_one_job(self._arguments, folder)
        return os.posix_spawn(
            sys.executable, words, os.environ, setsid=True, setsigdef=[signal.SIGCHLD, *_TERMINATION_SIGNALS]
        )

    def _reap(self) -> None:
        """Report the end of the running job, after killing the rest of its process group, and reap copies."""
        for copy in tuple(self._copies):
            if _has_ended(copy):
                kill_group(copy)
                os.waitpid(copy, 0)
                self._copies.remove(copy)
        if self._running is None or not _has_ended(self._running):
            return
        # The leader is not reaped yet, so its group id cannot have been reused.
        kill_group(self._running)
        _, status = os.waitpid(self._running, 0)
        self._running = None
        code = os.waitstatus_to_exitcode(status)
        self._send_event(event="exited", code=code if code >= 0 else None, signal=-code if code < 0 else None)

    def _send_event(self, **event: object) -> None:
        os.write(self._events, json.dumps(event).encode() + b"\n")


def _has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _handle_signal(*_: object) -> None:
    """Handle a signal, so that Python writes it to the wake-up pipe."""
