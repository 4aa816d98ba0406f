"""Searches one study with several workers on this machine: this process, and one for each further share."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from autotune.app.search import Run, run_search, storage_of
from autotune.app.workers.worker import serialize
from autotune.confidential import hidden
from autotune.core.events import Listener, Noted, StageStarted
from autotune.core.machine import Hardware, Share
from autotune.probing.channel import read_tail, start_module
from autotune.study.problem import SearchOutcome
from autotune.study.storage import begin
from autotune.units import plural

MODULE = "autotune.app.workers.worker"
# Time for an interrupted worker to end its probe, record it in the study, and end its probe server.
_ENDING_SECONDS = 20.0


def search_in_parallel(run: Run, further: Sequence[Share], listener: Listener, module: str = MODULE) -> SearchOutcome:
    """Search as :func:`~autotune.app.search.run_search` does, with a further worker on each further share.

    The workers share the study like workers of several machines, so this one reports the probes of the others as it
    reads them there. All write to the same output directory, in which each probe has its own folder. All end with this
    call, even after an error; their probes are in the study.

    Args:
        further: shares of the machine in addition to that of ``run.server``.
        module: the module that further workers run.

    Raises:
        InputError: the storage cannot be used, or not by several processes.
        AutotuneError: as in ``run_search``.
    """
    if not further:
        return run_search(run, listener)
    begin(storage_of(run), listener)
    joined = replace(run, arguments=replace(run.arguments, resume=True))
    listener(StageStarted(f"Starting {plural(len(further), 'further worker')}"))
    with _further_workers(joined, further, listener, module):
        return run_search(joined, listener)


@contextmanager
def _further_workers(run: Run, further: Sequence[Share], listener: Listener, module: str) -> Iterator[None]:
    search, hardware = serialize(run), run.problem.setting.machine.hardware
    workers: list[_Worker] = []
    try:
        for number, _ in enumerate(further, 2):
            worker = _Worker(number, module)
            workers.append(worker)
        for worker, share in zip(workers, further, strict=True):
            worker.send(share, hardware, search)
        yield
        for worker in workers:
            if failure := worker.failure():
                listener(Noted(failure))
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
    """A further worker's process."""

    def __init__(self, number: int, module: str) -> None:
        self._number = number
        # Ctrl-C in a terminal goes to the first worker, which ends the others.
        self._process, self._connection, self._output = start_module(module, (), {})

    def send(self, share: Share, hardware: Hardware, search: bytes) -> None:
        """Send the search, and the worker's share of the machine."""
        with contextlib.suppress(OSError):  # it has ended, which `failure` reports
            self._connection.send((share, hardware, search))

    def failure(self) -> str:
        """Return a sentence on why it ended; empty if it runs on, or has searched to the end."""
        if self._process.poll() is None:
            return ""
        why = f"{self._exit_text()}."
        with contextlib.suppress(EOFError, OSError):
            why = self._connection.recv()
        return why and f"Worker {self._number} (process {self._process.pid}) ended: {why} The others went on."

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def wait(self) -> None:
        """Wait for its end, for a limited time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_SECONDS)

    def close(self) -> None:
        """Kill it if it still runs, and release its resources."""
        self._process.kill()
        self._process.wait()
        self._connection.close()
        self._output.close()

    def _exit_text(self) -> str:
        code = self._process.returncode
        if code < 0:
            return f"signal {-code}"
        lines = read_tail(self._output).splitlines()
        return f"exit status {code}" + (f", {hidden(lines[-1])}" if lines else "")
