"""The environment variables by which the processes of a group, on one machine, find one another."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

_HOST = "127.0.0.1"
_LOOPBACK = "lo"


def launched(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the variables by which torch finds the group (torch/distributed/rendezvous.py, ``env://``).

    Args:
        port: of the first rank.
    """
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    found = {name: str(value) for name, value in own.items()} | {"MASTER_ADDR": _HOST}
    # Otherwise gloo asks which address the host's name has, which a container may not know.
    if any(name == _LOOPBACK for _, name in socket.if_nameindex()):
        found["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    return found


@contextmanager
def held_port() -> Iterator[int]:
    """Hold a port for a group: no other process gets it from the system, and the first rank can listen on it.

    Linux binds an address twice if both sockets allow it and none listens yet; torch's store allows it
    (torch/csrc/distributed/c10d/socket.cpp).
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((_HOST, 0))
        yield int(held.getsockname()[1])
