"""The process that serves jobs, and the lines of commands and events that are exchanged with it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_CLOSING_SECONDS = 10.0
_SHOWN_BYTES = 4000


class Gone(Exception):  # noqa: N818 an event, told by an exception
    """The process at the other end has ended."""


class Channel:
    """One server process. It reads commands from its standard input and writes events to its output, one JSON per line.

    Attributes:
        ready: whether the server has sent the event that it accepts commands.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start ``python -m autotune.step`` with ``arguments``; does not wait until it is ready.

        Args:
            arguments: of its command line.
            environment: variables beside those of this process.
        """
        paths = [str(_PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 lives as long as the process
        self._process = subprocess.Popen(
            # -P: a datasets.py or trl/ in the user's working directory must not be imported instead of the library.
            [sys.executable, "-P", "-m", "autotune.step", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        self._unread = b""
        self.ready = False

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def send(self, **command: object) -> None:
        """Send a command.

        Raises:
            Gone: the server has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise Gone from error

    def receive(self, timeout_seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next event, or None when none came in time.

        Raises:
            Gone: the server has ended.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([descriptor], [], [], left)
            if not readable:
                return None
            received = os.read(descriptor, 65536)
            if not received:
                raise Gone
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        self.ready = self.ready or event["event"] == "ready"
        return event

    def close(self) -> str:
        """End the server and return the end of its standard error."""
        if not self.ready:
            # It is still importing: no job has to be ended, and an orderly end would wait for the imports.
            self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        try:
            self._process.wait(_CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with self._errors as errors:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - _SHOWN_BYTES))
            return errors.read().decode(errors="replace").strip()
