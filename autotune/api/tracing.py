"""Running traces: in processes of their own, several beside one another where there are cores for it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

from autotune.core.events import Listener, StageStarted
from autotune.core.protocol import TraceRequest
from autotune.errors import AutotuneError, InputError, JobLostError, ProbeServerError
from autotune.planning.groups import way_to_train
from autotune.planning.traces import Traced, Untraceable
from autotune.probing import JobServer, trace_all

# Each has one of torch's processes, of about half a GiB.
_MOST_SERVERS = 4
_LONGEST_SECONDS = 120.0


class ServerTracer:
    """Runs traces by job servers, which are started when the first is wanted, and ended with this.

    Args:
        cores: that may be used.
        lent: servers that are there already and see no GPU; they are used first, and left running.
    """

    def __init__(self, cores: int, listener: Listener, lent: Sequence[JobServer] = ()) -> None:
        self._count = max(1, min(_MOST_SERVERS, cores))
        self._listener = listener
        self._lent = len(lent)
        self._servers = list(lent)
        self._folder = tempfile.TemporaryDirectory(prefix="autotune-")
        self._done = 0

    def __enter__(self) -> ServerTracer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers[self._lent :]:
            server.close()
        self._folder.cleanup()

    @property
    def folder(self) -> Path:
        """Where jobs may have their folders."""
        return Path(self._folder.name)

    @property
    def server(self) -> JobServer:
        """A server, for other jobs as well."""
        return self._started(1)[0]

    def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
        """Run traces; what cannot be traced is told, and what the user has to change is raised.

        Raises:
            InputError: the model cannot be used.
            ProbeServerError: processes cannot be started.
        """
        self._listener(StageStarted(f"Tracing {len(requests)} training steps with no GPU"))
        jobs = shared_out(requests, self._count)
        servers = self._started(min(self._count, len(jobs)))
        free: SimpleQueue[JobServer] = SimpleQueue()
        for server in servers:
            free.put(server)

        def run(number: int, job: Sequence[int]) -> Sequence[Traced]:
            server = free.get()
            try:
                return _traced(server, [requests[index] for index in job], self.folder / f"trace-{number}")
            finally:
                free.put(server)

        numbers = range(self._done, self._done + len(jobs))
        self._done += len(jobs)
        with ThreadPoolExecutor(len(servers)) as pool:
            done = zip(jobs, pool.map(run, numbers, jobs), strict=True)
            found = {index: traced for job, replies in done for index, traced in zip(job, replies, strict=True)}
        return [found[index] for index in range(len(requests))]

    def _started(self, count: int) -> list[JobServer]:
        while len(self._servers) < count:
            self._servers.append(JobServer("cpu", threads=1))
        return self._servers[:count]


def shared_out(requests: Sequence[TraceRequest], servers: int) -> list[list[int]]:
    """Return the indices of the requests of each job: those of one way to train together, unless servers lay idle."""
    by_way: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        by_way.setdefault(way_to_train(request), []).append(index)
    jobs = list(by_way.values())
    while len(jobs) < servers and max(map(len, jobs)) > 1:
        largest = max(jobs, key=len)
        jobs.remove(largest)
        half = (len(largest) + 1) // 2
        jobs += [largest[:half], largest[half:]]
    # The longest first, so that none is left to one server in the end.
    return sorted(jobs, key=len, reverse=True)


def _traced(server: JobServer, requests: Sequence[TraceRequest], folder: Path) -> Sequence[Traced]:
    try:
        return trace_all(server, requests, folder, _LONGEST_SECONDS * len(requests))
    except (InputError, ProbeServerError):
        raise
    except AutotuneError as error:
        return [Untraceable(error.message, lasting=not isinstance(error, JobLostError))] * len(requests)
