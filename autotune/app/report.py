"""Writes what a run found: its bundle and page, or for ``autotune report`` a page from ``result.json``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autotune.confidential import hidden_values
from autotune.core.codec import DecodeError, decode
from autotune.core.estimate import Plan
from autotune.core.json_text import read_json
from autotune.core.result import SCHEMA, Result, Timelines
from autotune.emit.bundle import RESULT, TIMELINE, write_bundle
from autotune.emit.files import write_text
from autotune.errors import InputError, UnwrittenError

PAGE = "report.html"
_FILES = {"html": PAGE, "markdown": "report.md"}


def write_report(what: Path | Plan, output: Path | None, form: str) -> Path:
    """Write the report of a run or a plan and return its file; see :func:`autotune.report`."""
    if form not in _FILES:
        raise InputError(f"There is no report in {form!r}.", hint=f"It is {' or '.join(_FILES)}.")
    if isinstance(what, Plan):
        if output is None:
            raise InputError("A plan has no directory to write its page to.", hint="Give output='plan.html'.")
        write_page(what, output, form)
        return output
    where = what
    source = where / RESULT if where.is_dir() else where
    result = read_result(source)
    target = output if output is not None else source.parent / _FILES[form]
    write_page(result, target, form)
    return target


def write_result(result: Result, directory: Path) -> Result:
    """Write the bundle and its page, and return the result, with a note where there is no page.

    Raises:
        UnwrittenError: the bundle cannot be written.
    """
    try:
        write_bundle(result, directory)
    except InputError as error:
        raise UnwrittenError(error, result) from error
    try:
        write_page(result, directory / PAGE)
    except InputError as error:
        return replace(result, notes=(*result.notes, f"There is no page: {error.message}"))
    return result


def write_page(document: Result | Plan, file: Path, form: str = "html") -> None:
    """Write the page of a result or of a plan to a file.

    Raises:
        InputError: the file cannot be written.
    """
    # Templates are read only where a report is written.
    from autotune.reporting.page import html, markdown

    write_text(file, html(document) if form == "html" else markdown(document))


def read_result(file: Path) -> Result:
    """Return the result in a file.

    Raises:
        InputError: there is none, or it is of another schema.
    """
    try:
        document = read_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"There is no result to report on: {file} cannot be read ({error.strerror}).",
            hint="Give the directory that `autotune probe` wrote.",
        ) from error
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}.", hint="Give what `autotune probe` wrote.") from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise InputError(
            f"{file} is no result of schema {SCHEMA}, but of {schema!r}.",
            hint="Run `autotune probe` with this version.",
        )
    try:
        # Earlier versions wrote what is secret, too.
        return decode(Result, hidden_values(document)).with_moments(_timelines(file.with_name(TIMELINE)))
    except DecodeError as error:
        raise InputError(
            f"{file} was written by another version: {error}.", hint="Run `autotune probe` with this version."
        ) from error


def _timelines(file: Path) -> Timelines:
    """Return the timelines in a file, or none: a page can do without them."""
    try:
        return decode(Timelines, read_json(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, DecodeError):
        return Timelines(None, None)
