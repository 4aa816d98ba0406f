"""Runs traces in separate processes, several at a time if there are enough cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType

from autotune.core.events import Listener, StageStarted, Tracing, ignore
from autotune.core.protocol import TRACED_FILE, TraceReply, TraceRequest
from autotune.errors import JobLostError
from autotune.probing.jobs import trace_all
from autotune.probing.scratch import ScratchFolder
from autotune.probing.server import JobServer
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
Way = list[int]
"""The indices of the requests of one technique combination, which differ only in sizes."""
# Additional time of the first trace of a process, in which all operators are new, compared with its later ones, in
# traces: about 0.6 for Llama-3.1-8B, and the job's own start.
_START_TRACES = 1.0
# Most jobs per server, if traces may share a process.
_MOST_JOBS = 4
# Each has one of torch's processes, of about half a GiB.
_MOST_SERVERS = 4
_LONGEST_SECONDS = 120.0
# Between two looks at how many traces have been run.
_INTERVAL_SECONDS = 0.25


class ServerTracer:
    """Runs traces on job servers, which are started at the first request and ended with this object.

    Args:
        cores: number of cores that may be used.
        lent: running servers that see no GPU; they are used first, and left running.
    """

    def __init__(self, cores: int, listener: Listener, lent: Sequence[JobServer] = ()) -> None:
        self._count = max(1, min(_MOST_SERVERS, cores))
        self._listener = listener
        self._lent = len(lent)
        self._servers = list(lent)
        self._folder = ScratchFolder()
        self._numbers = count()
        self._given_up = False

    def __enter__(self) -> ServerTracer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in reversed(self._servers[self._lent :]):
            server.close()
        self._folder.close()

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Tell nobody of the traces in this context, which are a stage of their caller's."""
        listener, self._listener = self._listener, ignore
        try:
            yield
        finally:
            self._listener = listener

    @property
    def folder(self) -> Path:
        """The directory for the folders of jobs."""
        return self._folder.path

    @property
    def server(self) -> JobServer:
        """A server, for other jobs as well."""
        return self._started(1)[0]

    def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
        """Run traces; a step that cannot be traced is returned as :class:`Untraceable`, unusable input is raised.

        Raises:
            InputError: the model cannot be used.
            ProbeServerError: processes cannot be started.
        """
        steps = "1 training step" if len(requests) == 1 else f"{len(requests)} training steps"
        self._listener(StageStarted(f"Tracing {steps} with no GPU"))
        jobs = shared_out(requests, self._count)
        servers = self._started(min(self._count, len(jobs)))
        free: SimpleQueue[JobServer] = SimpleQueue()
        for server in servers:
            free.put(server)
        folders: list[Path] = []
        self._given_up = False

        def new_folder() -> Path:
            if self._given_up:
                raise CancelledError
            folders.append(self.new_folder())
            return folders[-1]

        def run(job: Sequence[Way]) -> dict[int, Traced]:
            server = free.get()
            try:
                return _traced(server, job, requests, new_folder)
            finally:
                free.put(server)

        with ThreadPoolExecutor(len(servers)) as pool:
            running = [pool.submit(run, job) for job in jobs]
            try:
                self._follow(running, folders, len(requests))
            except BaseException:
                self._give_up(running, servers)
                raise
        found = {index: traced for job in running for index, traced in job.result().items()}
        return [found[index] for index in range(len(requests))]

    def _follow(self, running: Sequence[Future[dict[int, Traced]]], folders: Sequence[Path], count: int) -> None:
        """Wait for the end of all jobs, or the first error, and tell the listener how far they are."""
        started, told, left = time.monotonic(), -1, set(running)
        while True:
            # A trace that runs again in another process counts twice.
            done = min(count, sum(map(_traced_in, tuple(folders)))) if left else count
            if done != told:
                remaining = (time.monotonic() - started) * (count - done) / done if done else None
                self._listener(Tracing(done, count, remaining))
                told = done
            if not left:
                return
            ended, left = wait(left, _INTERVAL_SECONDS)
            for job in ended:
                job.result()

    def _give_up(self, running: Sequence[Future[dict[int, Traced]]], servers: Sequence[JobServer]) -> None:
        """End all jobs: threads wait for them, and an interrupted command has to end now."""
        self._given_up = True
        for job in running:
            job.cancel()
        while not all(job.done() for job in running):
            for server in servers:
                server.interrupt()
            wait(running, _INTERVAL_SECONDS)

    def new_folder(self) -> Path:
        """Return a directory in :attr:`folder` that is not there yet."""
        return self.folder / f"job-{next(self._numbers)}"

    def _started(self, count: int) -> list[JobServer]:
        if len(self._servers) < count:
            first = JobServer("cpu", threads=1, twins=self._count - len(self._servers) - 1, early=True)
            self._servers += [first, *first.twins]
        return self._servers[:count]


def shared_out(requests: Sequence[TraceRequest], servers: int) -> list[list[Way]]:
    """Return the technique combinations of each job, which may share a process, so that the last job ends early."""
    by_libraries: dict[str, dict[str, Way]] = {}
    for index, request in enumerate(requests):
        ways = by_libraries.setdefault(f"{request.target} {request.model.name} {libraries_of(request.plan)}", {})
        ways.setdefault(same_step(request.plan), []).append(index)
    kinds = [list(ways.values()) for ways in by_libraries.values()]
    costs = _costs(requests)
    given = [kinds, *(_with_halves(kinds, number) for number in range(len(kinds)))]
    shared = (_jobs(each, servers, times, costs) for each in given for times in range(1, _MOST_JOBS + 1))
    return min(shared, key=lambda jobs: _length(servers, jobs, costs))


def _costs(requests: Sequence[TraceRequest]) -> list[float]:
    """Return how long each trace takes, in traces of the fewest layers; its time goes with the layers."""
    layers = [request.layers for request in requests]
    fewest = min((number for number in layers if number is not None), default=1)
    return [number / fewest if number is not None else 1.0 for number in layers]


def _with_halves(kinds: Sequence[Sequence[Way]], number: int) -> list[list[Way]]:
    """Return the technique combinations with the last one of a kind divided in two, since most have the same size."""
    found = [list(ways) for ways in kinds]
    last = found[number].pop()
    found[number] += [way for (way,) in _halves([last])] if len(last) > 1 else [last]
    return found


def _jobs(kinds: Sequence[Sequence[Way]], servers: int, times: int, costs: Sequence[float]) -> list[list[Way]]:
    """Return jobs of about equal length, about ``times`` jobs for each server; the longest first."""
    enough = sum(_size(ways, costs) for ways in kinds) / (servers * times)
    jobs = [job for ways in kinds for job in _dealt(ways, max(1, round(_size(ways, costs) / enough)), costs)]
    while len(jobs) < servers and max(sum(map(len, job)) for job in jobs) > 1:
        largest = max(jobs, key=lambda job: (sum(map(len, job)) > 1, _size(job, costs)))
        jobs.remove(largest)
        jobs += _halves(largest)
    return sorted(jobs, key=lambda job: _size(job, costs), reverse=True)


def _length(servers: int, jobs: Sequence[Sequence[Way]], costs: Sequence[float]) -> float:
    """Return the time at which the last job ends, in traces of the fewest layers."""
    ends = [0.0] * servers
    for job in jobs:
        ends[ends.index(min(ends))] += _size(job, costs) + _START_TRACES
    return max(ends)


def _dealt(ways: Sequence[Way], count: int, costs: Sequence[float]) -> list[list[Way]]:
    """Return technique combinations in at most ``count`` jobs of about equal length."""
    jobs: list[list[Way]] = [[] for _ in range(count)]
    for way in sorted(ways, key=lambda way: _size([way], costs), reverse=True):
        min(jobs, key=lambda job: _size(job, costs)).append(way)
    return [job for job in jobs if job]


def _halves(job: Sequence[Way]) -> list[list[Way]]:
    if len(job) > 1:
        return [list(job[::2]), list(job[1::2])]
    half = (len(job[0]) + 1) // 2
    return [[job[0][:half]], [job[0][half:]]]


def _size(job: Iterable[Way], costs: Sequence[float]) -> float:
    return sum(costs[index] for way in job for index in way)


def _traced(
    server: JobServer, job: Sequence[Way], requests: Sequence[TraceRequest], new_folder: Callable[[], Path]
) -> dict[int, Traced]:
    """Return the results of a job's requests, by their index.

    A failed trace may leave its process in a bad state, so the requests after it run in another process. If a process
    dies, each technique combination gets its own process.
    """
    found: dict[int, Traced] = {}
    left = [list(job)]
    while left:
        ways = left.pop()
        indices = [index for way in ways for index in way]
        asked = [requests[index] for index in indices]
        try:
            replies, failure = trace_all(server, asked, new_folder(), _LONGEST_SECONDS * len(asked))
        except JobLostError as error:
            if len(ways) > 1:
                left += [[way] for way in ways]
            else:
                found |= dict.fromkeys(indices, Untraceable(error.message, lasting=False))
            continue
        found |= dict(zip(indices, replies, strict=False))
        if failure is not None:
            failed = next(number for number, way in enumerate(ways) if indices[len(replies)] in way)
            found |= dict.fromkeys(ways[failed], Untraceable(failure.message))
            left += [ways[failed + 1 :]] if ways[failed + 1 :] else []
    return found


def _traced_in(folder: Path) -> int:
    """Return how many traces the job of a folder has run so far."""
    try:
        return (folder / TRACED_FILE).stat().st_size
    except FileNotFoundError:
        return 0
