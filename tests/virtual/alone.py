"""Calls functions and runs scripts in fresh processes, in which nothing was traced or patched before.

The job server that all tests share forks them: it has imported the libraries already, which takes seconds.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import tests.metadata  # noqa: F401 for the processes of jobs
from autotune.probing import JobServer
from autotune.probing.server import load_reply
from autotune.step.job import JobContext

MODULE = "tests.virtual.alone"
JOB = "call"
T = TypeVar("T")


@dataclass(frozen=True)
class Pickled:
    """A function of a module with its first arguments, or what one returned, as hexadecimal digits."""

    digits: str

    @classmethod
    def of(cls, *values: object) -> Pickled:
        """Pickle values."""
        return cls(pickle.dumps(values).hex())

    @property
    def values(self) -> tuple[Any, ...]:
        """The values."""
        found: tuple[Any, ...] = pickle.loads(bytes.fromhex(self.digits))
        return found


def _called(request: Pickled, context: JobContext) -> object:
    """Call a function with its arguments and the context of the job; what it returns is the reply."""
    function, *arguments = request.values
    return function(*arguments, context)


JOBS = {JOB: _called}


def apart(server: JobServer, function: Callable[..., T], *arguments: object) -> T:
    """Return what a function of a module returns in a process that the server forks."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        server.run(JOB, Pickled.of(_returned, function, arguments), folder)
        reply = load_reply(folder, Pickled)
    assert isinstance(reply, Pickled), reply
    returned: T = reply.values[0]
    return returned


def _returned(function: Callable[..., object], arguments: tuple[object, ...], _: JobContext) -> Pickled:
    return Pickled.of(function(*arguments))


def printed_by(server: JobServer, script: str) -> str:
    """Return what a script prints."""
    return apart(server, _printed, script)


def found_by(server: JobServer, script: str) -> Any:
    """Return what a script prints last, read as JSON."""
    return json.loads(printed_by(server, script).splitlines()[-1])


def _printed(script: str) -> str:
    with redirect_stdout(StringIO()) as printed:
        exec(script, {"__name__": "__main__"})
    return printed.getvalue()
