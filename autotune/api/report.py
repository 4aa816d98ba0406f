"""``autotune.report``: a page about what a run found or a plan predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from autotune.app.report import write_report
from autotune.core.estimate import Plan


def report(
    directory: str | Path | Plan,
    *,
    output: str | Path | None = None,
    format: Literal["html", "markdown"] = "html",  # noqa: A002 the option's name
) -> Path:
    """Write a page about what a run found or a plan predicts, and return its file.

    Args:
        directory: what ``probe`` wrote, or its ``result.json``; or what ``plan`` returned.
        output: where to write; by default ``report.html`` or ``report.md`` beside ``result.json``. A plan needs it.
        format: ``html``, one page that needs no network and no other file; or ``markdown``, for a pull request.

    Raises:
        InputError: there is no result, it cannot be read, or the page cannot be written.
    """
    what = directory if isinstance(directory, Plan) else Path(directory)
    return write_report(what, Path(output) if output is not None else None, format)
