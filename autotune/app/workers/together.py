"""Searches one study with several workers on this machine: this process, and one for each further share."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from autotune.app.search import Run, run_search, storage_of
from autotune.app.workers.worker import serialize
from autotune.confidential import hidden
from autotune.core.events import (
    REPEATED,
    CandidateVetoed,
    Event,
    Listener,
    Noted,
    ProbeFinished,
    ProbeLost,
    ProbeStarted,
    StageStarted,
)
from autotune.core.machine import Hardware, Share
from autotune.probing.channel import read_tail, start_module
from autotune.study import SearchOutcome, begin
from autotune.units import counted

MODULE = "autotune.app.workers.worker"
# Time for an interrupted worker to end its probe, record it in the study, and end its probe server.
_ENDING_SECONDS = 20.0


def search_together(run: Run, further: Sequence[Share], listener: Listener, module: str = MODULE) -> SearchOutcome:
    """Search as :func:`~autotune.app.search.run_search` does, with a further worker on each further share.

    The workers share the study like workers of several machines. They write to the same output directory, in which each
    probe has its own folder. All workers end with this call, even after an error; their probes are in the study.

    Args:
        further: shares of the machine in addition to that of ``run.server``.
        listener: receives the events of all workers, from several threads, one event at a time.
        module: the module that further workers run.

    Raises:
        InputError: the storage cannot be used, or not by several processes.
        AutotuneError: as in ``run_search``.
    """
    if not further:
        return run_search(run, listener)
    begin(storage_of(run), listener)
    joined, forwarder = replace(run, arguments=replace(run.arguments, resume=True)), EventForwarder(listener)
    forwarder(StageStarted(f"Starting {counted(len(further), 'further worker')}"))
    with _further_workers(joined, further, forwarder, module):
        return run_search(joined, forwarder)


@contextmanager
def _further_workers(run: Run, further: Sequence[Share], forwarder: EventForwarder, module: str) -> Iterator[None]:
    data = serialize(run)
    workers: list[_Worker] = []
    try:
        for number, share in enumerate(further, 1):
            workers.append(_Worker(number, (share, run.problem.setting.machine.hardware), data, forwarder, module))
        yield
    finally:
        # Interrupt all before waiting for any.
        for worker in workers:
            worker.interrupt()
        try:
            for worker in workers:
                worker.wait()
        finally:
            for worker in workers:
                worker.close()


class _Worker:
    """A further worker's process, and the thread that forwards its events."""

    def __init__(
        self, number: int, devices: tuple[Share, Hardware], data: bytes, forwarder: EventForwarder, module: str
    ) -> None:
        self._number = number
        self._forwarder = forwarder
        self._closing = False
        # Ctrl-C in a terminal goes to the first worker, which ends the others.
        self._process, self._connection, self._output = start_module(module, (), {})
        self._thread = threading.Thread(target=self._follow, args=(devices, data), name=f"worker {number}")
        self._thread.start()

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C."""
        self._closing = True
        self._process.send_signal(signal.SIGINT)

    def wait(self) -> None:
        """Wait for its end, for a limited time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_SECONDS)

    def close(self) -> None:
        """Kill it if it still runs, and release its resources."""
        self._process.kill()
        self._process.wait()
        self._thread.join()
        self._connection.close()
        self._output.close()

    def _follow(self, devices: tuple[Share, Hardware], data: bytes) -> None:
        failure: str | None = None
        with contextlib.suppress(EOFError, OSError):
            self._connection.send(devices)
            self._connection.send_bytes(data)
            while failure is None:
                received = self._connection.recv()
                if isinstance(received, str):
                    failure = received
                else:
                    self._forwarder.pass_on_from(self._number, received)
        self._process.wait()
        if not self._closing and failure != "":
            why = failure or f"{self._exit_text()}."
            message = f"Worker {self._number + 1} (process {self._process.pid}) ended: {why} The others go on."
            self._forwarder.lost(self._number, message)

    def _exit_text(self) -> str:
        code = self._process.returncode
        if code < 0:
            return f"signal {-code}"
        lines = read_tail(self._output).splitlines()
        return f"exit status {code}" + (f", {hidden(lines[-1])}" if lines else "")


class EventForwarder:
    """Forwards the events of all workers of this machine to one listener, one at a time, from any thread.

    A worker reports its own probes, and those of others as it reads them from the study. An exception of the listener
    in another thread is raised again in the search's thread at the next event.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._reported: set[object] = set()
        self._running: dict[int, int] = {}
        self._failure: Exception | None = None

    def __call__(self, event: Event) -> None:
        """Forward an event of the first worker, unless it was reported already."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._pass_on(event, 0)

    def pass_on_from(self, worker: int, *events: Event) -> None:
        """Forward events of a further worker, except those reported already or irrelevant to the user."""
        with self._lock:
            if self._failure is not None:
                return
            try:
                for event in events:
                    self._pass_on(event, worker)
            except Exception as error:  # noqa: BLE001 the listener may be the user's; its error ends the search
                self._failure = error

    def lost(self, worker: int, reason: str) -> None:
        """Report that a worker ended early, and that its running probe, if any, is lost."""
        with self._lock:
            lost = [number for number, runner in self._running.items() if runner == worker]
        self.pass_on_from(worker, Noted(reason), *map(ProbeLost, lost))

    def _pass_on(self, event: Event, worker: int) -> None:
        if worker and not isinstance(event, (ProbeStarted, ProbeFinished, ProbeLost, CandidateVetoed, Noted)):
            return
        match event:
            case ProbeStarted(number=number):
                self._running[number] = worker
            case ProbeFinished(number=number) | ProbeLost(number=number):
                self._running.pop(number, None)
        mark = _mark(event)
        if mark is None or mark not in self._reported:
            self._reported.add(mark)
            self._listener(event)


def _mark(event: Event) -> object | None:
    """Return a key that is equal for duplicate events, or None for an event that is always new."""
    match event:
        case ProbeFinished(number=number, purpose=purpose) if purpose not in REPEATED:
            return ("finished", number)
        case CandidateVetoed(number=number):
            return ("vetoed", number)
        case Noted(text=text):
            return ("noted", text)
    return None
