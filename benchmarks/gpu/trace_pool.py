"""Job servers that run traces and other tasks without a device in parallel, until the time is over."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TypeVar

from autotune.core.jobs.traced import TraceRequest
from autotune.errors import AutotuneError
from autotune.probing import JobServer, trace
from autotune.probing.tracing import Traced, Untraceable

T = TypeVar("T")
NO_TIME = "no time was left"
"""The reason for a missing trace that was requested, or begun, too late."""


class TracePool:
    """Runs jobs, each on one of several servers.

    Args:
        servers: how many.
        end_seconds: on the clock of :func:`time.monotonic`; no trace goes on after it.
    """

    def __init__(self, servers: int, end_seconds: float) -> None:
        self._end_seconds = end_seconds
        self._servers = [JobServer("cpu", threads=1) for _ in range(servers)]
        self._free: SimpleQueue[JobServer] = SimpleQueue()
        for server in self._servers:
            self._free.put(server)
        self._threads = ThreadPoolExecutor(servers)
        self._folder = tempfile.TemporaryDirectory(prefix="autotune-")
        self._numbers = itertools.count()

    def __enter__(self) -> TracePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        for server in self._servers:
            server.close()
        self._folder.cleanup()

    def submit(self, job: Callable[[JobServer, Path], T]) -> Future[T]:
        """Run a job on a server, in a separate folder."""
        folder = Path(self._folder.name, str(next(self._numbers)))

        def run() -> T:
            server = self._free.get()
            try:
                return job(server, folder)
            finally:
                self._free.put(server)

        return self._threads.submit(run)

    def trace(self, request: TraceRequest) -> Future[Traced]:
        """Trace a step, and report failures and missing time."""
        return self.submit(lambda server, folder: self._traced(server, request, folder))

    def trace_all(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
        """Trace steps, and return them in their order."""
        return [future.result() for future in [self.trace(request) for request in requests]]

    def _traced(self, server: JobServer, request: TraceRequest, folder: Path) -> Traced:
        left_seconds = self._end_seconds - time.monotonic()
        if left_seconds <= 0:
            return Untraceable(NO_TIME)
        try:
            return trace(server, request, folder, left_seconds)
        except AutotuneError as error:
            return Untraceable(NO_TIME if time.monotonic() >= self._end_seconds else error.message)
