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
from autotune.errors import AutotuneError, InputError, ProbeServerError
from autotune.planning.traces import Traced, Untraceable
from autotune.probing import JobServer, trace

# A trace holds one of torch's processes, of about half a GiB each with what they share.
_MOST_SERVERS = 2
_LONGEST_SECONDS = 120.0


class ServerTracer:
    """Runs traces by job servers, which are started when the first is wanted, and ended with this.

    Args:
        cores: that may be used.
    """

    def __init__(self, cores: int, listener: Listener) -> None:
        self._count = max(1, min(_MOST_SERVERS, cores))
        self._listener = listener
        self._servers: list[JobServer] = []
        self._folder = tempfile.TemporaryDirectory(prefix="autotune-")
        self._done = 0

    def __enter__(self) -> ServerTracer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
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
        servers = self._started(min(self._count, len(requests)))
        free: SimpleQueue[JobServer] = SimpleQueue()
        for server in servers:
            free.put(server)

        def run(number: int, request: TraceRequest) -> Traced:
            server = free.get()
            try:
                return _traced(server, request, self.folder / f"trace-{number}")
            finally:
                free.put(server)

        numbers = range(self._done, self._done + len(requests))
        self._done += len(requests)
        with ThreadPoolExecutor(len(servers)) as pool:
            return list(pool.map(run, numbers, requests))

    def _started(self, count: int) -> list[JobServer]:
        while len(self._servers) < count:
            self._servers.append(JobServer("cpu", threads=1))
        return self._servers[:count]


def _traced(server: JobServer, request: TraceRequest, folder: Path) -> Traced:
    try:
        return trace(server, request, folder, _LONGEST_SECONDS)
    except (InputError, ProbeServerError):
        raise
    except AutotuneError as error:
        return Untraceable(error.message)
