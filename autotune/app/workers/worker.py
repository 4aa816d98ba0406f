"""A further worker: ``python -m autotune.app.workers.worker FD`` searches the study that it receives at a socket."""

from __future__ import annotations

import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

from autotune.app.search import run_search
from autotune.app.workers.exchange import Assignment, unpacked
from autotune.core.events import ignore
from autotune.errors import AutotuneError
from autotune.probing import JobServer
from autotune.probing.tracing import ServerTracer


def main(connection: Connection) -> None:
    """Search until nothing is left to do, or the first worker is gone; a failure is reported and not raised."""
    # A command that was started in the background ignores Ctrl-C, and its workers must not. A scheduler may end all
    # processes of a job at once.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    try:
        failure = ""
        try:
            _search(connection)
        except AutotuneError as error:
            failure = str(error)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        connection.send(failure)
    except (KeyboardInterrupt, EOFError, BrokenPipeError, ConnectionError):
        # The first worker has ended, or is about to: there is no receiver.
        return


def _search(connection: Connection) -> None:
    assignment = connection.recv()
    assert isinstance(assignment, Assignment)
    share, hardware = assignment.share, assignment.hardware
    with JobServer(hardware.kind, threads=hardware.threads, processes=hardware.processes, share=share) as server:
        lent = server if hardware.kind == "cpu" else None
        with ServerTracer(hardware.cores, ignore, lent) as tracer:
            run = unpacked(connection.recv_bytes(), server, tracer)
            threading.Thread(target=_end_with_the_first, args=(connection,), daemon=True).start()
            run_search(run, connection.send)


def _end_with_the_first(connection: Connection) -> None:
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        # A real signal ends a wait for a probe, too.
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
