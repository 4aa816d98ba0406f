"""The messages between the first worker and the further ones, and the serialised search.

At a socket, the first worker sends an :class:`Assignment` and then the packed :class:`~autotune.app.search.Run`; the
other one answers with events as they happen, and at last with a text: why it gave up, or nothing if it did not. At the
end of the socket, which is the end of the first worker, the other one interrupts itself as Ctrl-C would.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

from autotune.app.search import Run
from autotune.core.machine import Hardware, Share
from autotune.probing import JobServer
from autotune.probing.tracing import ServerTracer

_OWN = {JobServer: "server", ServerTracer: "tracer"}
"""What each worker has of its own, and what stands for it in a search that is sent."""


@dataclass(frozen=True)
class Assignment:
    """The devices of a worker, which it needs before it receives a search.

    Attributes:
        hardware: the device as each worker has it.
    """

    share: Share
    hardware: Hardware


class _Packer(pickle.Pickler):
    def persistent_id(self, obj: object) -> str | None:
        """Return the reference that replaces an object in a serialised search, or None to serialise the object."""
        return _OWN.get(type(obj))


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, server: JobServer, tracer: ServerTracer) -> None:
        super().__init__(io.BytesIO(data))
        self._own = {"server": server, "tracer": tracer}

    def persistent_load(self, pid: Any) -> object:
        """Return this worker's own object in the place of the sender's."""
        return self._own[pid]


def packed(run: Run) -> bytes:
    """Return a search with all that was traced for it, without the sender's processes."""
    file = io.BytesIO()
    _Packer(file, pickle.HIGHEST_PROTOCOL).dump(run)
    return file.getvalue()


def unpacked(data: bytes, server: JobServer, tracer: ServerTracer) -> Run:
    """Return a search that :func:`packed` made, with this worker's own processes."""
    run = _Unpacker(data, server, tracer).load()
    assert isinstance(run, Run)
    return run
