"""Runs jobs in processes that a job server forks, and replaces a server that dies."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

from autotune.core.files.atomic import unwritten
from autotune.core.files.scratch import is_temporary
from autotune.core.jobs.exchange import ExchangeError, check_reply_fits, read_reply, write_request
from autotune.core.jobs.protocol import Failure, InputProblem
from autotune.core.machine import WHOLE, DeviceKind, Share
from autotune.errors import InputError, ProbeServerError, UnreadError
from autotune.inspection.cpu import cpu_variables, out_of_memory_kills
from autotune.probing.channel import STACK, Channel, ChannelClosed, ServerProcess, signal_name
from autotune.units import format_duration

R = TypeVar("R")

START_SECONDS = 600.0
"""Time limit for the start of the server, and of a process: imports from a slow network drive take minutes."""
# Time for the server to report the end of a killed process.
_KILLING_SECONDS = 10.0
_SHOWN_LINES = 5


@dataclass(frozen=True)
class JobExit:
    """The end of a job's process.

    Attributes:
        code: its exit status, or None.
        signal: the number of the signal that ended it, or None.
        timed_out: whether it exceeded its time limit and was killed.
        server_died: whether the connection was lost: the server died, and the process with it, or was closed.
        wall_seconds: time from the request to the end.
        oom_kills: out-of-memory kills by the kernel in this time, from the control group's counter ``oom_kill``.
    """

    wall_seconds: float
    code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    server_died: bool = False
    oom_kills: int = 0

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the process was killed while the kernel counted an out-of-memory kill."""
        return self.oom_kills > 0 and (self.signal == signal.SIGKILL or self.server_died)


class TimeLimited:
    """Has a time limit for what it runs, in a context."""

    _end_seconds = math.inf

    @contextlib.contextmanager
    def time_limit(self, seconds: float | None) -> Iterator[None]:
        """Limit the time of what runs in this context, which is killed at its end; None: no limit."""
        before = self._end_seconds
        self._end_seconds = min(before, math.inf if seconds is None else time.monotonic() + seconds)
        try:
            yield
        finally:
            self._end_seconds = before

    @property
    def left_seconds(self) -> float:
        """Seconds that are left, 0 or less if none are; infinite without a limit."""
        return self._end_seconds - time.monotonic()


class JobServer(TimeLimited):
    """Starts processes for jobs through a server process that has preloaded the imports.

    The server starts in the background at construction; the first job waits for it. A server that dies is replaced
    once: it is an error if two die without a completed job in between, or if one fails to start. Several threads may
    run jobs at a time.

    Args:
        device: the device that jobs run on; the server does not initialise CUDA, so that its children can use it. On a
            CPU, the environment is that of :func:`autotune.inspection.cpu.cpu_variables`.
        threads: CPU threads of a process, set by OMP_NUM_THREADS; None leaves the variable unchanged.
        processes: maximum number of processes of a job, each with its own GPU.
        share: cores and GPUs of the server and its jobs.
        spawn: start a new interpreter for each job instead of forking. The server also does so if CUDA is initialised.
        jobs_module: name of a module whose ``JOBS`` are added to the server's.
    """

    def __init__(
        self,
        device: DeviceKind,
        *,
        threads: int | None = None,
        processes: int = 1,
        share: Share = WHOLE,
        spawn: bool = False,
        jobs_module: str | None = None,
    ) -> None:
        self._arguments = ["--device", device, "--processes", str(processes)]
        self._arguments += ["--cores", ",".join(map(str, share.cores))] if share.cores else []
        self._arguments += ["--spawn"] if spawn else []
        self._arguments += ["--jobs", jobs_module] if jobs_module is not None else []
        self._environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        self._environment |= cpu_variables() if device == "cpu" else {}
        self._environment |= {} if share.gpus is None else {"CUDA_VISIBLE_DEVICES": share.gpus}
        self._deaths = 0
        # Protects the server while it is started, waited for, commanded, or replaced.
        self._lock = RLock()
        self._channel: ServerProcess | None = ServerProcess(self._arguments, self._environment)

    def __enter__(self) -> JobServer:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server and its running job."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    @property
    def pid(self) -> int | None:
        """The server's process id, or None without a running server."""
        return self._channel.pid if self._channel is not None else None

    def run(self, job: str, request: object, folder: Path, timeout_seconds: float | None = None) -> JobExit:
        """Run a job in its own process, whose process group has ended afterwards. See :meth:`Worker.run`."""
        with contextlib.closing(Worker(self)) as worker:
            seconds = min(max(0.0, self.left_seconds), math.inf if timeout_seconds is None else timeout_seconds)
            return worker.run(job, request, folder, None if seconds == math.inf else seconds)

    def start(self) -> tuple[Channel, ServerProcess]:
        """Start a process for jobs; return the connection to it, and its server.

        Raises:
            ProbeServerError: the server could not be started, or died and could not be replaced.
        """
        # Locked, since a dead server is replaced.
        with self._lock:
            while True:
                server = self.wait()
                try:
                    process = server.start(START_SECONDS)
                except ChannelClosed:
                    self.replace(server)
                    continue
                if process is None:
                    raise self._close_with_error(f"has not started one in {format_duration(START_SECONDS)}")
                return process, server

    def job_completed(self) -> None:
        """Reset the count of dead servers."""
        self._deaths = 0

    def wait(self) -> ServerProcess:
        """Wait until the server accepts jobs, and return it.

        Raises:
            ProbeServerError: it could not be started, or died and could not be replaced.
        """
        with self._lock:
            channel = self._channel
            if channel is None:
                channel = self._channel = ServerProcess(self._arguments, self._environment)
            try:
                while not channel.ready:
                    if channel.receive(START_SECONDS) is None:
                        channel.write_stack()
                        problem = f"has not started in {format_duration(START_SECONDS)}: its imports hang"
                        raise self._close_with_error(problem)
            except ChannelClosed as error:
                status = channel.status()
                if status is not None and status >= 0:
                    raise self._close_with_error("could not be started") from error
                # For instance by the kernel, for lack of memory that may be free a moment later.
                killed = f"was killed by signal {-status} ({signal_name(-status)})" if status is not None else "died"
                self.replace(channel, f"{killed} twice while it started")
                return self.wait()
            return channel

    def replace(self, dead: ServerProcess, problem: str = "died twice") -> None:
        """Start another server in place of a dead one; do nothing if another thread has, or this is closed.

        Args:
            problem: text of the error if another server has died before, without a completed job since.

        Raises:
            ProbeServerError: another server has died before, without a completed job since.
        """
        with self._lock:
            if dead is not self._channel:
                return
            self._deaths += 1
            if self._deaths > 1:
                raise self._close_with_error(problem)
            self._channel = ServerProcess(self._arguments, self._environment)
        dead.close()

    def _close_with_error(self, problem: str) -> ProbeServerError:
        channel, self._channel = self._channel, None
        output = channel.close() if channel is not None else ""
        before, found, stack = output.rpartition(STACK)
        frames = [line for line in stack.splitlines() if line and "<frozen " not in line] if found else []
        lines = [*(before if found else output).splitlines()[-_SHOWN_LINES:], *([STACK] if found else [])]
        shown = "\n".join(["Its output:", *lines, *frames[:_SHOWN_LINES]])
        return ProbeServerError(f"The process that starts probes {problem}.", hint=shown)


class Worker:
    """A process that a job server starts, which runs jobs one after another. It ends with the server.

    The caller closes it after a failed job, which may leave the process in a bad state. After a time-out, or after its
    process has ended, it runs no further job.

    Args:
        server: the server, which may still be starting.

    Attributes:
        jobs: number of completed jobs.

    Raises:
        ProbeServerError: the server could not be started, or died and could not be replaced.
    """

    def __init__(self, server: JobServer) -> None:
        self.jobs = 0
        self._server = server
        self._interrupted = False
        self._channel, self._server_process = server.start()

    def run(
        self,
        job: str,
        request: object,
        folder: Path,
        timeout_seconds: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> JobExit:
        """Run a job in ``folder`` and wait for its end.

        Args:
            timeout_seconds: time after which the process is killed, from the start of the job; None: never.
            env: a launcher's environment variables for this rank; None for a single process.

        Raises:
            InputError: the folder cannot be written, or the disk is full.
            ProbeServerError: the server died and could not be replaced.
        """
        start_seconds, kills_before = send_request(job, request, folder), out_of_memory_kills()
        event: Mapping[str, Any] | None = {"event": "ended"}
        try:
            self._channel.send(start=str(folder.resolve()), env=env or {})
            event = self._channel.receive(timeout_seconds)
            connection_lost = False
        except ChannelClosed:
            connection_lost = True
            if not self._interrupted:
                self._server.replace(self._server_process)
        else:
            self.jobs += 1
            self._server.job_completed()
        wall_seconds, ending = time.monotonic() - start_seconds, event or {}
        if ending.get("event") != "done":
            self.close()
        return JobExit(
            wall_seconds,
            ending.get("code"),
            ending.get("signal"),
            timed_out=event is None,
            server_died=connection_lost,
            oom_kills=out_of_memory_kills() - kills_before,
        )

    def interrupt(self) -> None:
        """Kill the process; may be called while another thread waits for a job."""
        self._interrupted = True
        self._channel.kill()

    def close(self) -> None:
        """Kill the process and its process group, and wait for their end."""
        self.interrupt()
        with contextlib.suppress(ChannelClosed):
            while self._channel.pid is not None and self._channel.receive(_KILLING_SECONDS) is not None:
                pass
        self._channel.disconnect()


def send_request(job: str, request: object, folder: Path) -> float:
    """Write a request and return its time, on the clock of :func:`time.monotonic`.

    Raises:
        InputError: the folder cannot be written, or the disk is full.
    """
    try:
        return write_request(folder, job, request)
    except OSError as error:
        raise _unwritable(folder, error) from error


def load_reply(folder: Path, expected: type[R]) -> R | Failure:
    """Return the reply in the folder of a job that has ended.

    Raises:
        ExchangeError: the reply is absent or cannot be read.
        InputError: the folder was removed or cannot be written, or the disk is full; or the reply reports a problem of
            the user's input.
    """
    try:
        reply = read_reply(folder, expected)
    except ExchangeError:
        try:
            check_reply_fits(folder)
        except FileNotFoundError as error:
            hint = "Run the command again; add --resume if the study is in --storage."
            raise InputError(f"{folder} was removed while a job ran in it.", hint=hint) from error
        except OSError as error:
            raise _unwritable(folder, error) from error
        raise
    if isinstance(reply, InputProblem):
        raise (UnreadError if reply.unread else InputError)(reply.message, hint=reply.hint)
    return reply


def _unwritable(folder: Path, error: OSError) -> InputError:
    searches = "choose another output directory; --resume continues a search"
    advice = "set TMPDIR to another directory" if is_temporary(folder) else searches
    return unwritten(folder, error, advice)
