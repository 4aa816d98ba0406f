"""Defines a job: its request, the function that runs it, and the conversion of errors to replies."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.confidential import hidden
from autotune.core.jobs.protocol import Failure
from autotune.errors import causes

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class JobContext:
    """The context of a job, in addition to its request.

    Attributes:
        folder: the job's folder, for the files that it writes.
        sent_seconds: when the parent sent the request, on the clock of :func:`time.monotonic`.
    """

    folder: Path
    sent_seconds: float


JobFunction = Callable[[Any, JobContext], object]
"""Runs a job: its first parameter is annotated with the request's dataclass; it returns the reply's dataclass."""


def failure_of(error: Exception) -> Failure:
    """Convert an error to the reply for the parent, and write it to the job's log."""
    return Failure(
        kind=type(error).__name__,
        message=hidden(str(error)),
        traceback=log_error(error),
        transient=isinstance(error, (MemoryError, OSError)),
    )


def lacks_space(error: BaseException) -> bool:
    """Whether an error is caused by a full disk, a quota or a file size limit, also in native libraries."""
    texts = [os.strerror(number) for number in _NO_SPACE]
    return any(
        getattr(each, "errno", None) in _NO_SPACE or any(text in str(each) for text in texts) for each in causes(error)
    )


def log_error(error: Exception) -> str:
    """Write an error with its traceback to the job's log, and return both."""
    text = hidden("".join(traceback.format_exception(error)))
    sys.stderr.write(text)
    return text
