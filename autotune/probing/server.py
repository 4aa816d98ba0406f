"""The parent's side of the job server, which runs one job after another, each in its own process."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

from autotune.core.exchange import ExchangeError, check_reply_fits, read_reply, write_request
from autotune.core.machine import WHOLE, DeviceKind, Share
from autotune.core.protocol import Failure, InputProblem
from autotune.errors import InputError, ProbeServerError
from autotune.inspection.cpu import cpu_variables
from autotune.probing.channel import Channel, ChannelClosed, Started, signal_name

R = TypeVar("R")

# Time within which the server has to report the end of a process that it has killed.
_KILLING_SECONDS = 10.0
_SHOWN_LINES = 5


@dataclass(frozen=True)
class JobExit:
    """How a job's process ended.

    Attributes:
        code: its exit status, or None.
        signal: the number of the signal that ended it, or None.
        timed_out: whether it was killed because of its time limit.
        server_died: whether the server, and the process with it, ended first.
        wall_seconds: time from the request to the end.
        kills: number of processes that the kernel killed out of memory meanwhile, as counted by its control groups.
    """

    wall_seconds: float
    code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    server_died: bool = False
    kills: int = 0

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether something outside killed it while the kernel killed a process because memory ran out."""
        return self.kills > 0 and (self.signal == signal.SIGKILL or self.server_died)


class JobServer:
    """Starts one process per job, by a server process that has preloaded the imports.

    The server starts in the background when this object is made; the first job waits for it. A server that dies is
    replaced, once: when two die with no job completed in between, or one fails to start, jobs cannot be run. Threads
    may fork workers while one runs a job.

    Args:
        device: the device that jobs run on; the server does not initialise CUDA, so that its children can use it. On a
            CPU, the environment is that of :func:`autotune.inspection.cpu.cpu_variables`.
        threads: CPU threads of a process, set by OMP_NUM_THREADS; None leaves the variable unchanged.
        processes: most processes of a job, each with a GPU of its own.
        share: the part of the machine that the server and its jobs see and run on.
        spawn: start a new interpreter for each job instead of forking. The server also does so if it cannot keep CUDA
            uninitialised.
        jobs_module: name of a module whose ``JOBS`` the server runs too.
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
        # Held where the server is started, waited for, commanded, or replaced.
        self._lock = RLock()
        self._channel: Started | None = Started(self._arguments, self._environment)

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
        """The server's process id, or None when there is none at present."""
        return self._channel.pid if self._channel is not None else None

    def run(self, job: str, request: object, folder: Path, timeout_seconds: float | None = None) -> JobExit:
        """Run a job in ``folder`` and wait for its process to end; no process of its group is left afterwards.

        A time-out counts from the start of the process. An exception while waiting ends the process too.

        Raises:
            InputError: the folder cannot be written, or the disk is full.
            ProbeServerError: the server could not be started, or died and could not be replaced.
        """
        while True:
            channel = self._ready_channel()
            sent_seconds = send_request(job, request, folder)
            pid: int | None = None
            try:
                channel = self._send(start=str(folder.resolve()))
                pid = self._started(channel)
                ended = self._ended(channel, timeout_seconds)
                timed_out = ended is None
                if ended is None:
                    ended = self._kill(channel)
                break
            except ChannelClosed:
                if pid is None:
                    # The server had died before and the job was not started, so the same job is sent to a new server.
                    self._count_death(channel)
                    continue
                # The kernel has ended the job's main process with the server; others of its group may be left.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                self._count_death(channel)
                return JobExit(wall_seconds=time.monotonic() - sent_seconds, server_died=True)
            except BaseException:
                try:
                    self._kill(channel)
                except ChannelClosed:
                    self.close()
                raise
        self.job_completed()
        return JobExit(
            wall_seconds=time.monotonic() - sent_seconds,
            code=ended["code"],
            signal=ended["signal"],
            timed_out=timed_out,
        )

    def wait(self) -> None:
        """Wait until the server accepts jobs.

        Raises:
            ProbeServerError: it could not be started, or died and could not be replaced.
        """
        self._ready_channel()

    def fork(self, folder: Path) -> Started:
        """Fork a process from the server that runs jobs in itself; see :class:`autotune.probing.worker.Worker`.

        Args:
            folder: has the named pipes that it is to use.

        Returns:
            The server that forks it, with which it ends.

        Raises:
            ProbeServerError: the server could not be started, or died and could not be replaced.
        """
        return self._send(fork=str(folder))

    def job_completed(self) -> None:
        """Forget earlier deaths of servers: jobs can be run."""
        self._deaths = 0

    def _ready_channel(self) -> Started:
        with self._lock:
            channel = self._channel
            if channel is None:
                channel = self._channel = Started(self._arguments, self._environment)
            try:
                while not channel.ready:
                    channel.receive()
            except ChannelClosed as error:
                status = channel.status()
                if status is not None and status >= 0:
                    raise self._given_up("could not be started") from error
                # Such as by the kernel, for want of memory that a moment later may be free.
                killed = f"was killed by signal {-status} ({signal_name(-status)})" if status is not None else "died"
                self._count_death(channel, f"{killed} twice while it started")
                return self._ready_channel()
            return channel

    def _send(self, **command: object) -> Started:
        """Send a command to a server that is ready, and return that; one that is found dead is replaced."""
        # With the lock, since the descriptors of one that is replaced are used again.
        with self._lock:
            while True:
                channel = self._ready_channel()
                try:
                    channel.send(**command)
                except ChannelClosed:
                    self._count_death(channel)
                else:
                    return channel

    @staticmethod
    def _started(channel: Channel) -> int:
        """Return the process id of the job that was started; unread events of an interrupted job are skipped."""
        while True:
            event = channel.receive()
            if event is not None and event["event"] == "started":
                return int(event["pid"])

    @staticmethod
    def _ended(channel: Channel, timeout_seconds: float | None) -> dict[str, Any] | None:
        """Return the event of the running job's end, or None when it did not come in time."""
        while True:
            event = channel.receive(timeout_seconds)
            if event is None or event["event"] in ("exited", "idle"):
                return event

    def _kill(self, channel: Channel) -> dict[str, Any]:
        """Tell the server to kill the running job, and return the event of its end.

        Raises:
            ChannelClosed: the server has ended or does not answer, and has to be closed, which ends the job too.
        """
        channel.send(kill=True)
        event = self._ended(channel, _KILLING_SECONDS)
        if event is None:
            raise ChannelClosed
        return event

    def _count_death(self, dead: Started, twice: str = "died twice") -> None:
        with self._lock:
            if dead is not self._channel:
                # Another thread has found it dead before.
                return
            self._deaths += 1
            if self._deaths > 1:
                raise self._given_up(twice)
            self._channel = Started(self._arguments, self._environment)
        dead.close()

    def _given_up(self, what: str) -> ProbeServerError:
        channel, self._channel = self._channel, None
        output = channel.close().splitlines()[-_SHOWN_LINES:] if channel is not None else []
        return ProbeServerError(f"The process that starts probes {what}.", hint="\n".join(["Its output:", *output]))


def send_request(job: str, request: object, folder: Path) -> float:
    """Write a request and return when it was sent.

    Raises:
        InputError: the folder cannot be written, or the disk is full.
    """
    try:
        return write_request(folder, job, request)
    except OSError as error:
        raise _unwritable(folder, error) from error


def received_reply(folder: Path, expected: type[R]) -> R | InputProblem | Failure:
    """Return the reply in the folder of a job that has ended.

    Raises:
        ExchangeError: it is absent or cannot be read.
        InputError: it is, because the folder was removed or cannot be written, or the disk is full.
    """
    try:
        return read_reply(folder, expected)
    except ExchangeError:
        try:
            check_reply_fits(folder)
        except FileNotFoundError as error:
            hint = "Run the command again; a study elsewhere, of --storage, goes on with --resume."
            raise InputError(f"{folder} was removed while a job ran in it.", hint=hint) from error
        except OSError as error:
            raise _unwritable(folder, error) from error
        raise


def _unwritable(folder: Path, error: OSError) -> InputError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    problem = "is on a full disk" if full else f"cannot be written: {error.strerror}"
    hint = "Free some space and resume." if full else "Choose another output directory."
    return InputError(f"{folder} {problem}.", hint=hint)
