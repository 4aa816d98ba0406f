"""``autotune.report``: a page about what a run found."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from autotune.app.report import write_report


def report(
    directory: str | Path,
    *,
    output: str | Path | None = None,
    format: Literal["html", "markdown"] = "html",  # noqa: A002 the option's name
) -> Path:
    """Write a page about what a run found, and return its file.

    Args:
        directory: what ``probe`` wrote, or its ``result.json``.
        output: where to write; by default ``report.html`` or ``report.md`` beside ``result.json``.
        format: ``html``, one page that needs no network and no other file; or ``markdown``, for a pull request.

    Raises:
        InputError: there is no result, it cannot be read, or the page cannot be written.
    """
    return write_report(Path(directory), Path(output) if output is not None else None, format)
