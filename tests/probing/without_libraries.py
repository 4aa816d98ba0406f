"""``python -m autotune.step`` without PyTorch and TRL: misbehaving jobs use neither, and importing them takes seconds."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping

from autotune.step import server
from autotune.step.__main__ import main
from autotune.step.job import JobType

MODULE = "tests.probing.without_libraries"


def _nothing(*_: object) -> None:
    pass


def _offered(module: str | None) -> Mapping[str, JobType]:
    """Return the jobs of a module alone."""
    assert module is not None
    jobs: Mapping[str, JobType] = importlib.import_module(module).JOBS
    return jobs


if __name__ == "__main__":
    server.preload = server.preload_early = _nothing
    server.offered_jobs = _offered
    server.accelerator_is_initialized = lambda: False
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
