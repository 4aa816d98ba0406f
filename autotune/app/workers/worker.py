"""A further worker: ``python -m autotune.app.workers.worker`` searches the study that it receives.

Protocol, over a socket that is this process's standard input: the first worker sends this worker's share, the hardware
of each worker, and the packed :class:`~autotune.app.search.Run`. At the end, this worker replies with the reason of its
failure, or an empty text. When the first worker ends, the socket closes, and this worker sends itself SIGINT.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

from autotune.app.search import Run, run_search, worker_servers
from autotune.core.events import ignore
from autotune.errors import AutotuneError
from autotune.probing import JobServer
from autotune.probing.tracing import ServerTracer

_REFERENCES = {JobServer: "server", ServerTracer: "tracer"}
"""Types of objects that each worker creates itself, with the references that replace them in a serialised search."""


class _Packer(pickle.Pickler):
    def persistent_id(self, obj: object) -> str | None:
        """Return the reference that replaces an object in a serialised search, or None to serialise the object."""
        return _REFERENCES.get(type(obj))


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, server: JobServer, tracer: ServerTracer) -> None:
        super().__init__(io.BytesIO(data))
        self._own = {"server": server, "tracer": tracer}

    def persistent_load(self, pid: Any) -> object:
        """Return this worker's own object in place of the sender's."""
        return self._own[pid]


def serialize(run: Run) -> bytes:
    """Return a serialised search with its traces, without the sender's processes."""
    file = io.BytesIO()
    _Packer(file, pickle.HIGHEST_PROTOCOL).dump(run)
    return file.getvalue()


def deserialize(data: bytes, server: JobServer, tracer: ServerTracer) -> Run:
    """Return the search that :func:`serialize` serialised, with this worker's own processes."""
    run = _Unpacker(data, server, tracer).load()
    assert isinstance(run, Run)
    return run


def main(connection: Connection) -> None:
    """Search until the study is complete or the first worker has ended; a failure is sent to the first worker."""
    # A background command ignores Ctrl-C, but its workers must not. A scheduler may signal all processes at once.
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
        # The first worker has ended or is ending: nobody receives.
        return


def _search(connection: Connection) -> None:
    share, hardware, data = connection.recv()
    threading.Thread(target=_end_with_the_first, args=(connection,), daemon=True).start()
    with worker_servers(hardware, share, ignore) as (server, tracer):
        run = deserialize(data, server, tracer)
        with tracer.time_limit(run.timeout_seconds):
            run_search(run, ignore)


def _end_with_the_first(connection: Connection) -> None:
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        # A real signal also interrupts a wait for a probe.
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main(Connection(0))
