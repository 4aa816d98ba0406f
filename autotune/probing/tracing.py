"""Runs traces in persistent worker processes, several at a time if there are enough cores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from threading import Lock

from autotune.core.events import Listener, Tracing
from autotune.core.files.scratch import scratch_folder
from autotune.core.jobs.traced import TraceReply, TraceRequest
from autotune.errors import AutotuneError, InputError, JobLostError, ProbeServerError
from autotune.probing.jobs import trace
from autotune.probing.server import JobServer, TimeLimited, Worker
from autotune.techniques.traits import library_patches_key


@dataclass(frozen=True)
class Untraceable:
    """A step that cannot be traced, with the reason; ``lasting`` if every further try would fail too."""

    reason: str
    lasting: bool = True


Traced = TraceReply | Untraceable
# A worker needs about half a GiB, half of which it shares with the server.
_MAX_CONCURRENT_TRACES = 8
# Idle workers keep other models' modules, and other patches of libraries, for later traces.
_MAX_WORKERS = 12
_TRACE_TIMEOUT_SECONDS = 120.0


class ServerTracer(TimeLimited, AbstractContextManager["ServerTracer"]):
    """Runs traces in workers of a job server, which starts at the first request and ends with this object.

    Workers persist until then, one per core for each set of patches that plans apply to libraries. When time is up,
    running traces are ended, and no further ones are started.

    Args:
        cores: most traces at a time.
        lent: a running server without a GPU, which is left running; None: start one.
    """

    def __init__(self, cores: int, listener: Listener, lent: JobServer | None = None) -> None:
        self._count = max(1, min(_MAX_CONCURRENT_TRACES, cores))
        self._listener = listener
        self._idle: list[tuple[str, Worker]] = []
        self._busy: set[Worker] = set()
        self._lock = Lock()
        self._stack = ExitStack()
        self.folder = Path(self._stack.enter_context(scratch_folder()))
        self._folder_numbers = count()
        self._cancelled = False
        self._server = lent

    def __exit__(self, *_error: object) -> None:
        # Interrupt all first, so that they end concurrently.
        for _, worker in self._idle:
            worker.interrupt()
        for _, worker in self._idle:
            worker.close()
        self._stack.close()

    @property
    def server(self) -> JobServer:
        """The job server, which may run other jobs as well."""
        if self._server is None:
            self._server = self._stack.enter_context(JobServer("cpu", threads=1))
        return self._server

    def __call__(self, requests: Sequence[TraceRequest]) -> Iterator[Traced]:
        """Run traces and yield their results in the order of the requests, each as soon as all before it are there.

        Raises:
            InputError: the model cannot be used.
            ProbeServerError: processes cannot be started.
        """
        # In this thread, so that an interrupt ends the command while the server starts.
        self.server.wait()
        self._cancelled = False
        with ThreadPoolExecutor(self._count) as pool:
            running = [pool.submit(self._run_trace, request) for request in requests]
            try:
                self._listener(Tracing(0, len(running)))
                for done, job in enumerate(running, start=1):
                    traced = job.result()
                    self._listener(Tracing(done, len(running)))
                    yield traced
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                with self._lock:
                    self._cancelled = True
                    for worker in self._busy:
                        worker.interrupt()
                raise

    def _run_trace(self, request: TraceRequest) -> Traced:
        """Return the result of a request; closes the worker of a failed trace, which may be in a bad state.

        Repeats the request in a new worker if a used one is lost: an earlier trace may be the cause.
        """
        # Patches of libraries persist in a process.
        key = f"{request.target} {request.model.name} {library_patches_key(request.plan)}"
        while (left_seconds := self.left_seconds) > 0:
            worker, usable = self._worker(key), False
            was_new = not worker.jobs
            try:
                reply = trace(worker, request, self.new_folder(), min(_TRACE_TIMEOUT_SECONDS, left_seconds))
                usable = not self._cancelled
                return reply
            except (InputError, ProbeServerError):
                raise
            except AutotuneError as error:
                lasting = not isinstance(error, JobLostError)
                if lasting or was_new or self._cancelled:
                    return Untraceable(error.message, lasting)
            finally:
                with self._lock:
                    self._busy.remove(worker)
                    self._idle += [(key, worker)] if usable else []
                if not usable:
                    worker.close()
        return Untraceable("no time was left", lasting=False)

    def _worker(self, key: str) -> Worker:
        """Return an idle worker with the same patches of libraries, or a new one; not after an interrupt."""
        with self._lock:
            if self._cancelled:
                raise CancelledError
            place = next((at for at, (idle_key, _) in enumerate(self._idle) if idle_key == key), None)
            while place is None and len(self._idle) + len(self._busy) >= _MAX_WORKERS and self._idle:
                self._idle.pop(0)[1].close()
            worker = Worker(self.server) if place is None else self._idle.pop(place)[1]
            self._busy.add(worker)
            return worker

    def new_folder(self) -> Path:
        """Return the path of a new directory in :attr:`folder`."""
        return self.folder / f"job-{next(self._folder_numbers)}"
