"""What a job is: a request, a function that answers it, and how an error becomes an answer."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.core.protocol import Failure


@dataclass(frozen=True)
class JobContext:
    """What a job knows beside its request.

    Attributes:
        folder: the job's folder, for what it has to write.
        sent_seconds: when it was asked for, on the clock of :func:`time.monotonic`.
    """

    folder: Path
    sent_seconds: float


@dataclass(frozen=True)
class JobType:
    """A kind of job: the dataclass of its request, and what runs it and returns the dataclass of its reply."""

    request: type
    run: Callable[[Any, JobContext], object]


def failure_of(error: Exception) -> Failure:
    """Return an error as it is told to the parent; the job's log has it too."""
    traceback.print_exception(error)
    text = "".join(traceback.format_exception(error))
    return Failure(kind=type(error).__name__, message=str(error), traceback=text)
