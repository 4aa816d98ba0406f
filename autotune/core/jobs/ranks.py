"""The environment variables of a process group on one machine, and the reservation of its port."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

_HOST = "127.0.0.1"
_LOOPBACK = "lo"


def rank_variables(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the variables of a rank for torch's ``env://`` rendezvous (torch/distributed/rendezvous.py).

    Args:
        port: port of the first rank.
    """
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    variables = {name: str(value) for name, value in own.items()} | {"MASTER_ADDR": _HOST}
    # Otherwise gloo resolves the host's name, which may fail in a container.
    if any(name == _LOOPBACK for _, name in socket.if_nameindex()):
        variables["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    return variables


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a free port for a group: the system gives it to no other process, but the first rank can listen on it.

    With SO_REUSEADDR on both sockets, Linux binds an address twice while neither listens; torch's store sets it
    (torch/csrc/distributed/c10d/socket.cpp).
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((_HOST, 0))
        yield int(reserved.getsockname()[1])
