"""Runs a job in several processes, one for each rank: starts them, and ends all when one of them fails."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from autotune.core.protocol import RANK_FOLDER, REPLY_FILE, REQUEST_FILE, RankEnding, RanksReply

RANK_FAILED = 3
"""Exit status of a rank that replied that it failed."""
# The user's environment may have RANK set.
_OWN_VARIABLE = "AUTOTUNE_RANK"
_HOST = "127.0.0.1"
_LOOPBACK = "lo"

Start = Callable[[Path, Mapping[str, str]], int]
"""Starts the process of a rank, given its folder and its environment variables, and returns its process id."""


def is_rank() -> bool:
    """Return whether this process is one of several that run a job together."""
    return _OWN_VARIABLE in os.environ


def run_ranks(folder: Path, count: int, start: Start) -> RanksReply:
    """Run the job in ``folder`` in ``count`` processes, and return how they ended.

    Each rank has a folder of its own with a copy of the request, and the variables that ``torchrun`` sets. When a rank
    fails, the others are killed: they would wait for it in a collective operation for ever.
    """
    port = free_port()
    started: dict[int, int] = {}
    for rank in range(count):
        own = folder / RANK_FOLDER.format(rank=rank)
        own.mkdir(exist_ok=True)
        # A rank that is killed would otherwise be measured by what it replied in an earlier try.
        (own / REPLY_FILE).unlink(missing_ok=True)
        shutil.copyfile(folder / REQUEST_FILE, own / REQUEST_FILE)
        started[start(own, {**launched(rank, count, port), _OWN_VARIABLE: str(rank)})] = rank
    endings: dict[int, RankEnding] = {}
    first_failed: int | None = None
    while len(endings) < count:
        pid, status = os.wait()
        if pid not in started:
            continue
        code, rank = os.waitstatus_to_exitcode(status), started.pop(pid)
        late = first_failed is not None and code == -signal.SIGKILL
        endings[rank] = RankEnding(code if code >= 0 else None, -code if code < 0 else None, late)
        if code != 0 and first_failed is None:
            first_failed = rank
            for left in started:
                os.kill(left, signal.SIGKILL)
    return RanksReply(tuple(endings[rank] for rank in range(count)), first_failed)


def launched(rank: int, count: int, port: int | None = None) -> dict[str, str]:
    """Return the variables by which torch finds the group (torch/distributed/rendezvous.py, ``env://``).

    Args:
        port: of the first rank; None: one that is free.
    """
    port = free_port() if port is None else port
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    found = {name: str(value) for name, value in own.items()} | {"MASTER_ADDR": _HOST}
    # Otherwise gloo asks which address the host's name has, which a container may not know.
    if any(name == _LOOPBACK for _, name in socket.if_nameindex()):
        found["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    return found


def free_port() -> int:
    """Return a port of the loopback address that nothing uses now."""
    with socket.socket() as held:
        held.bind((_HOST, 0))
        return int(held.getsockname()[1])
