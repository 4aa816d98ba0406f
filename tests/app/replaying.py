"""A further worker whose probes are replayed from a formula, without processes or training."""

from __future__ import annotations

import os
import time
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from autotune.app import search
from autotune.app.workers import worker
from autotune.core.jobs.protocol import ProbeRequest
from autotune.core.measurement import Measurement
from autotune.core.status import ProbeStatus
from autotune.probing import JobServer
from autotune.units import MIB
from tests.study import running  # noqa: F401 (its SQLite waits for no disk)

MODULE = "tests.app.replaying"
LOG = "probed"
HANG = "hang"
"""While there is a file of this name in the output, a probe does not end."""
BEGUN = "begun"
"""There is a file of this name in the output once the further worker has begun a probe."""


class _NoServer(JobServer):
    def __init__(self, device: Any, **_: Any) -> None: ...

    def close(self) -> None: ...


def no_server() -> JobServer:
    """Return a server that has no process."""
    return JobServer.__new__(JobServer)


def replay(server: JobServer, request: ProbeRequest, folder: Path, timeout_seconds: float | None) -> Measurement:
    """Return a measurement that follows from the plan, and record the probing process in the output."""
    output = folder.parent.parent
    while (output / HANG).exists():
        time.sleep(0.01)
    time.sleep(0.05)
    with (output / LOG).open("a") as lines:
        lines.write(f"{os.getpid()} {folder.name} {request.plan.fingerprint}\n")
    rate = 1000.0 + zlib.crc32(request.plan.fingerprint.encode()) % 1000
    return Measurement(
        ProbeStatus.OK, peak_bytes=MIB, tokens_per_second=rate, step_seconds=0.1, micro_batch_seconds=0.1,
        micro_batches_timed=1, update_seconds=0.0, wall_seconds=0.1,
    )  # fmt: skip


def _begin(server: JobServer, request: ProbeRequest, folder: Path, timeout_seconds: float | None) -> Measurement:
    (folder.parent.parent / BEGUN).touch()
    return replay(server, request, folder, timeout_seconds)


if __name__ == "__main__":
    with mock.patch.object(search, "run_probe", _begin), mock.patch.object(worker, "JobServer", _NoServer):
        worker.main(Connection(0))
