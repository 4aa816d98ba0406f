"""Writes a command's result to stdout and its progress to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

from rich.console import Console

from autotune.emit.document import json_text
from autotune.reporting.document import Document
from autotune.reporting.terminal import show

_Result = TypeVar("_Result")


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        # Rich would exit with 1, which means that nothing fits.
        raise BrokenPipeError


def stdout_console() -> Console:
    """Return the console for a command's result."""
    return _Console(highlight=False)


def stderr_console() -> Console:
    """Return the console for progress and summaries."""
    return _Console(stderr=True, highlight=False)


def write_json(document: object) -> None:
    """Write a dataclass to stdout as JSON in UTF-8, in any locale."""
    sys.stdout.buffer.write(json_text(document).encode(errors="backslashreplace"))
    sys.stdout.buffer.flush()


def write_result(result: _Result, report: Callable[[_Result], Document], *, as_json: bool) -> None:
    """Write a command's result to stdout, as JSON or as a report."""
    if as_json:
        write_json(result)
    else:
        show(report(result), stdout_console())
