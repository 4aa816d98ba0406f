"""The job server: preloads the libraries once, then starts processes for jobs and never runs one itself."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle

from autotune.step.child import job_functions, run_jobs, send_event
from autotune.step.imports import accelerator_is_initialized, preload
from autotune.step.job import JobFunction

# PR_SET_PDEATHSIG of linux/prctl.h.
_PR_SET_PDEATHSIG = 1
# Interval of checks for a lost parent: another process may still hold the other end of standard input.
_PARENT_CHECK_SECONDS = 1.0
# A scheduler may send these to every process of a job. The server ignores them, and ends with its parent.
_TERMINATION_SIGNALS = tuple(
    number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN
)


class Server:
    """Serves one parent. See :mod:`autotune.step.__main__` for the protocol."""

    def __init__(self, *, device: str, spawn: bool, jobs_module: str | None) -> None:
        self._device = device
        self._spawn = spawn
        self._jobs_module = jobs_module
        self._parent = os.getppid()
        self._connection = Connection(0)
        # Connections of the running workers, by their process ids.
        self._connections: dict[int, Connection] = {}

    def serve(self) -> int:
        """Serve until standard input ends or the parent is gone; return the exit status."""
        # The parent asks where imports hang.
        faulthandler.register(signal.SIGUSR1, all_threads=False)
        preload(self._device)
        jobs = job_functions(self._jobs_module)
        faulthandler.unregister(signal.SIGUSR1)
        # Jobs on a CPU use no CUDA: bitsandbytes, which peft imports, may have initialised it.
        self._spawn = self._spawn or (self._device == "cuda" and accelerator_is_initialized())
        try:
            self._open_wakeup_pipe()
            send_event(self._connection, event="ready", pid=os.getpid())
            self._listen(jobs)
        finally:
            for pid in self._connections:
                _kill_group(pid)
                os.waitpid(pid, 0)
        return 0

    def _open_wakeup_pipe(self) -> None:
        """Make ``self._wakeup_fd`` readable at the end of a child process."""
        self._wakeup_fd, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        # Python writes a signal that has a handler to the pipe.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _TERMINATION_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _listen(self, jobs: Mapping[str, JobFunction]) -> None:
        while os.getppid() == self._parent:
            readable = wait([self._connection, self._wakeup_fd], _PARENT_CHECK_SECONDS)
            if self._wakeup_fd in readable:
                os.read(self._wakeup_fd, 4096)
                self._reap()
            if self._connection in readable:
                try:
                    file = recv_handle(self._connection)
                except EOFError:
                    return
                os.set_inheritable(file, False)
                self._start_worker(Connection(file), jobs)

    def _start_worker(self, connection: Connection, jobs: Mapping[str, JobFunction]) -> None:
        """Start a worker in a new process group, which reads its jobs from the connection."""

        def run() -> int:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, *_TERMINATION_SIGNALS):
                signal.signal(number, signal.SIG_DFL)
            if self._spawn:
                os.dup2(connection.fileno(), 0)
                os.execv(sys.executable, [sys.executable, "-P", "-m", "autotune.step", *sys.argv[1:], "--worker"])
            for other in self._connections.values():
                other.close()
            return run_jobs(connection, jobs)

        pid = _fork_process(run)
        # Before the parent is sent the process id, by which it kills the group. The process may have done it already.
        with suppress(PermissionError):
            os.setpgid(pid, pid)
        self._connections[pid] = connection
        send_event(connection, event="ready", pid=pid)

    def _reap(self) -> None:
        """Kill the groups of workers that have ended, and report their exits."""
        for pid in [pid for pid in self._connections if _has_ended(pid)]:
            # The leader is not reaped yet, so its group id cannot have been reused.
            _kill_group(pid)
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            with self._connections.pop(pid) as connection:
                exit_event = {"code": code, "signal": None} if code >= 0 else {"code": None, "signal": -code}
                send_event(connection, event="ended", **exit_event)


def _has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _fork_process(run: Callable[[], int]) -> int:
    """Fork a process that runs a function, exits with its result, and ends with this process; return its id."""
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        # The kernel keeps this setting across an exec (prctl(2)).
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            status = run()
    except BaseException:  # noqa: BLE001 the forked process must not return into its parent's loop
        traceback.print_exc()
    finally:
        os._exit(status)


def _kill_group(leader: int) -> None:
    """Kill a process that is not yet reaped, and every process in its process group."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)
