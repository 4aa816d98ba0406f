"""A job that cannot write its files reports a full disk as what the user has to mend, not as a failure of its own."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.core.exchange import read_reply, write_request
from autotune.core.protocol import Failure, InputProblem
from autotune.step.child import execute
from autotune.step.job import JobContext, JobType

FULL = os.strerror(errno.ENOSPC)


@dataclass(frozen=True)
class Nothing:
    """A request, and a reply."""


def reply_after(error: Exception, folder: Path) -> Nothing | InputProblem | Failure:
    """Run a job that raises an error, and return its reply."""

    def fail(request: Nothing, context: JobContext) -> Nothing:
        raise error

    write_request(folder, "fail", Nothing())
    execute(folder, {"fail": JobType(Nothing, fail)}, [])
    return read_reply(folder, Nothing)


def wrapped(cause: Exception) -> Exception:
    """Return an error of a library that another one caused."""
    error = ValueError("the rows cannot be saved")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, FULL),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        # As tokenizers and safetensors raise it.
        Exception(f"{FULL} (os error 28)"),
        wrapped(OSError(errno.ENOSPC, FULL)),
    ],
    ids=repr,
)
def test_a_full_disk_is_for_the_user_to_mend(error: Exception, tmp_path: Path) -> None:
    reply = reply_after(error, tmp_path)
    assert isinstance(reply, InputProblem)
    assert "no space left" in reply.message
    assert str(tmp_path) in reply.hint


def test_another_error_of_the_disk_is_a_failure(tmp_path: Path) -> None:
    reply = reply_after(OSError(errno.EIO, os.strerror(errno.EIO)), tmp_path)
    assert isinstance(reply, Failure)
