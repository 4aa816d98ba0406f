"""``python -m autotune.step`` without PyTorch and TRL, whose imports take seconds: misbehaving jobs use neither."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping

from autotune.step import server
from autotune.step.__main__ import main
from autotune.step.job import JobFunction

MODULE = "tests.probing.without_libraries"


def _nothing(*_: object) -> None:
    pass


def _offered(module: str | None) -> Mapping[str, JobFunction]:
    """Return the jobs of a module alone."""
    assert module is not None
    jobs: Mapping[str, JobFunction] = importlib.import_module(module).JOBS
    return jobs


if __name__ == "__main__":
    nothing = dict.fromkeys(("preload", "accelerator_is_initialized"), _nothing)
    for name, stand_in in {**nothing, "job_functions": _offered}.items():
        setattr(server, name, stand_in)
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
