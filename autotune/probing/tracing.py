"""Runs traces in processes that stay, several at a time if there are enough cores."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from math import ceil
from pathlib import Path
from threading import Lock

from autotune.core.events import Listener, StageStarted, Tracing, ignore
from autotune.core.traced import TRACED_FILE, TraceReply, TraceRequest
from autotune.errors import JobLostError
from autotune.probing.jobs import trace_all
from autotune.probing.scratch import ScratchFolder
from autotune.probing.server import JobServer
from autotune.probing.worker import Worker
from autotune.techniques.traits import libraries_of, same_step


@dataclass(frozen=True)
class Untraceable:
    """A step that cannot be traced.

    Attributes:
        reason: why, with the name of the operator or the combination.
        lasting: whether another try would fail too, so that the result may be kept.
    """

    reason: str
    lasting: bool = True


Traced = TraceReply | Untraceable
# Each has about half a GiB, of which it shares half with the server.
_MOST_AT_ONCE = 8
# Idle ones keep what was loaded for other models and patched in other libraries.
_MOST_WORKERS = 12
_LONGEST_SECONDS = 120.0
# Between two looks at how many traces have been run.
_INTERVAL_SECONDS = 0.25


@dataclass(frozen=True)
class Group:
    """Requests of one technique combination, which differ only in sizes and are traced one after another.

    Attributes:
        libraries: key of the processes in which they can be traced: what is patched in libraries stays patched.
        indices: of the requests.
    """

    libraries: str
    indices: tuple[int, ...]


class ServerTracer:
    """Runs traces in workers of a job server, which is started at the first request and ended with this object.

    Workers stay until then, one per core for each way in which plans patch libraries.

    Args:
        cores: number of cores that may be used.
        lent: a running server that sees no GPU, to fork workers from; it is left running. None: one is started.
        early: start it when this object is entered: it imports what traces need while something else is done.

    Attributes:
        folder: the directory for the folders of jobs.
    """

    def __init__(self, cores: int, listener: Listener, lent: JobServer | None = None, *, early: bool = False) -> None:
        self._count = max(1, min(_MOST_AT_ONCE, cores))
        self._listener = listener
        self._lent = lent
        self._early = early
        self._server: JobServer | None = lent
        self._idle: list[tuple[str, Worker]] = []
        self._busy: set[Worker] = set()
        self._lock = Lock()
        self._scratch = ScratchFolder()
        self.folder = self._scratch.path
        self._numbers = count()
        self._given_up = False

    def __enter__(self) -> ServerTracer:
        if self._early:
            self._server = self.server
        return self

    def __exit__(self, *_error: object) -> None:
        for _, worker in self._idle:
            worker.close()
        if self._server is not None and self._lent is None:
            self._server.close()
        self._scratch.close()

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Report no progress in this context: its traces are a stage of the caller's."""
        listener, self._listener = self._listener, ignore
        try:
            yield
        finally:
            self._listener = listener

    @property
    def server(self) -> JobServer:
        """The server, for other jobs as well."""
        if self._server is None:
            self._server = JobServer("cpu", threads=1, early=True)
        return self._server

    def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
        """Run traces; a step that cannot be traced is returned as :class:`Untraceable`, unusable input is raised.

        Raises:
            InputError: the model cannot be used.
            ProbeServerError: processes cannot be started.
        """
        steps = "1 training step" if len(requests) == 1 else f"{len(requests)} training steps"
        self._listener(StageStarted(f"Tracing {steps} with no GPU"))
        # Not in a thread: an interrupted command has to end while its server starts, too.
        self.server.wait()
        left = deque(groups(requests, self._count))
        found: dict[int, Traced] = {}
        folders: list[Path] = []
        self._given_up = False

        def run() -> None:
            while (group := self._next(left)) is not None:
                found.update(self._traced(group, requests, folders))

        with ThreadPoolExecutor(min(self._count, len(left))) as pool:
            running = [pool.submit(run) for _ in range(min(self._count, len(left)))]
            try:
                self._follow(running, folders, len(requests))
            except BaseException:
                self._give_up(running)
                raise
        return [found[index] for index in range(len(requests))]

    def _next(self, left: deque[Group]) -> Group | None:
        """Take the next group; one for which a worker is idle, if there is one."""
        with self._lock:
            if self._given_up or not left:
                return None
            known = {libraries for libraries, _ in self._idle}
            group = next((group for group in left if group.libraries in known), left[0])
            left.remove(group)
            return group

    def _traced(self, group: Group, requests: Sequence[TraceRequest], folders: list[Path]) -> dict[int, Traced]:
        """Return the results of a group's requests, by their index.

        A failed trace may leave its process in a bad state, so that the worker is not used again. One that is lost may
        have died of what it ran before, so that the group is tried once more in a new one.
        """
        asked = [requests[index] for index in group.indices]
        while True:
            worker = self._worker(group.libraries)
            was_new, usable, folder = not worker.jobs, False, self.new_folder()
            folders.append(folder)
            try:
                replies, failure = trace_all(worker, asked, folder, _LONGEST_SECONDS * len(asked))
                usable = failure is None
            except JobLostError as error:
                if was_new or self._given_up:
                    return dict.fromkeys(group.indices, Untraceable(error.message, lasting=False))
                continue
            finally:
                self._release(group.libraries, worker, usable=usable)
            found: dict[int, Traced] = dict(zip(group.indices, replies, strict=False))
            for index in group.indices[len(replies) :]:
                found[index] = Untraceable(failure.message if failure is not None else "")
            return found

    def _worker(self, libraries: str) -> Worker:
        """Return a worker for a way to patch libraries, which is new if none is idle."""
        with self._lock:
            idle = next((item for item in self._idle if item[0] == libraries), None)
            if idle is not None:
                self._idle.remove(idle)
                worker = idle[1]
            else:
                while len(self._idle) + len(self._busy) >= _MOST_WORKERS and self._idle:
                    self._idle.pop(0)[1].close()
                worker = Worker(self.server, self.new_folder())
            self._busy.add(worker)
            return worker

    def _release(self, libraries: str, worker: Worker, *, usable: bool) -> None:
        with self._lock:
            self._busy.remove(worker)
            if usable and not self._given_up:
                self._idle.append((libraries, worker))
            else:
                worker.close()

    def _follow(self, running: Sequence[Future[None]], folders: Sequence[Path], count: int) -> None:
        """Wait until all is traced, or for the first error, and report progress to the listener."""
        started, reported, left = time.monotonic(), -1, set(running)
        while True:
            # A trace that runs again in another process counts twice.
            done = min(count, sum(map(_traced_in, tuple(folders)))) if left else count
            if done != reported:
                remaining = (time.monotonic() - started) * (count - done) / done if done else None
                self._listener(Tracing(done, count, remaining))
                reported = done
            if not left:
                return
            ended, left = wait(left, _INTERVAL_SECONDS)
            for job in ended:
                job.result()

    def _give_up(self, running: Sequence[Future[None]]) -> None:
        """End all traces that run: threads wait for them, and an interrupted command has to end now."""
        self._given_up = True
        while not all(job.done() for job in running):
            with self._lock:
                for worker in self._busy:
                    worker.interrupt()
            wait(running, _INTERVAL_SECONDS)

    def new_folder(self) -> Path:
        """Return a directory in :attr:`folder` that is not there yet."""
        return self.folder / f"job-{next(self._numbers)}"


def groups(requests: Sequence[TraceRequest], workers: int) -> list[Group]:
    """Return the requests in groups, the longest first, and enough of them for all workers if there are enough."""
    ways: dict[tuple[str, str], list[int]] = {}
    for index, request in enumerate(requests):
        libraries = f"{request.target} {request.model.name} {libraries_of(request.plan)}"
        ways.setdefault((libraries, same_step(request.plan)), []).append(index)
    most = ceil(len(requests) / workers)
    parts = [
        Group(libraries, tuple(way[first : first + most]))
        for (libraries, _), way in ways.items()
        for first in range(0, len(way), most)
    ]
    return sorted(parts, key=lambda group: sum(requests[index].layers or 0 for index in group.indices), reverse=True)


def _traced_in(folder: Path) -> int:
    """Return how many traces the job of a folder has run so far."""
    try:
        return (folder / TRACED_FILE).stat().st_size
    except FileNotFoundError:
        return 0
