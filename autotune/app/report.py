"""Writes the bundle and page of a run; the use case of ``autotune report``, a page from ``result.json``."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from autotune.app.public import check_type
from autotune.confidential import hidden_values
from autotune.core.documents.bundle import Basis
from autotune.core.documents.estimate import Plan
from autotune.core.documents.result import Result, Timelines
from autotune.core.files.codec import DecodeError, decode, decoded
from autotune.core.files.json_text import read_json
from autotune.emit.bundle import PLAN, RESULT, TIMELINE, write_bundle
from autotune.emit.files import check_file, write_text
from autotune.errors import InputError, UnwrittenError
from autotune.inspection.paths import user_path
from autotune.reporting.document import Document
from autotune.reporting.plan import plan_report
from autotune.reporting.probe import probe_report

PAGE = "report.html"
_GIVE, _AGAIN = "Give the directory that `autotune probe` wrote.", "Run `autotune probe` with this version."
_FILES = {"html": PAGE, "markdown": "report.md"}


def report(
    directory: str | Path | Plan,
    *,
    output: str | Path | None = None,
    format: Literal["html", "markdown"] = "html",  # noqa: A002 the option's name
) -> Path:
    """Write the result of a run, or a plan, as a page, and return its file.

    Args:
        directory: output directory of ``probe``, or its ``result.json``; or the ``Plan`` that ``plan`` returned.
        output: file to write; by default ``report.html`` or ``report.md`` next to ``result.json``. A plan needs it.
        format: ``html``, one page that needs no network and no other file; or ``markdown``, for a pull request.

    Raises:
        InputError: there is no result, it cannot be read, or the page cannot be written.
    """
    check_type("directory", directory, str | Path | Plan)
    check_type("output", output, str | Path | None)
    check_type("format", format, Literal["html", "markdown"])
    target = user_path(output) if output is not None else None
    if target is not None:
        check_file(target, "--output")
    if isinstance(directory, Plan):
        if target is None:
            raise InputError("A plan has no directory to write its page to.", hint="Give output='plan.html'.")
        write_page(plan_report(directory), target, format)
        return target
    source = result_file(directory)
    target = target or source.parent / _FILES[format]
    write_page(probe_report(read_result(source)), target, format)
    return target


def write_result(result: Result, directory: Path) -> Result:
    """Write the bundle and its page, and return the result, with a note if the page failed.

    Raises:
        UnwrittenError: the bundle cannot be written.
    """
    try:
        write_bundle(result, directory)
    except InputError as error:
        raise UnwrittenError(error, result) from error
    try:
        write_page(probe_report(result), directory / PAGE)
    except InputError as error:
        return replace(result, notes=(*result.notes, f"There is no page: {error.message}"))
    return result


def write_page(document: Document, file: Path, form: str = "html") -> None:
    """Write a report to a file, as a page of HTML or as Markdown.

    Raises:
        InputError: the file cannot be written.
    """
    # Templates are read only if a report is written.
    from autotune.reporting.page.html import html_page
    from autotune.reporting.page.markdown import markdown_page

    write_text(file, html_page(document) if form == "html" else markdown_page(document))


def result_file(place: str | Path) -> Path:
    """Return the result file at a path, which may be the output directory; a plan's directory has the plan's file."""
    file = user_path(place)
    with suppress(OSError):  # `read_result` reports the reason
        if file.is_dir():
            planned = (file / PLAN).exists() and not (file / RESULT).exists()
            return file / (PLAN if planned else RESULT)
    return file


def read_result(file: Path) -> Result:
    """Return the result in a file.

    Raises:
        InputError: there is none, or it has another schema.
    """
    try:
        document = read_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"There is no result: {file} cannot be read ({error.strerror}).", hint=_GIVE) from error
    except ValueError as error:
        hint = "Run `autotune probe` again with --resume, which writes it anew." if file.name == RESULT else _GIVE
        raise InputError(f"{file} is not JSON: {error}.", hint=hint) from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema is None:
        raise InputError(f"{file} is not a result of `autotune probe`.", hint=_GIVE)
    if "estimates" in document or document.get("basis") == Basis.PLANNED:
        raise InputError(
            f"{file} is a plan, and `autotune report` reads the results of probes.",
            hint="`autotune plan --html FILE` writes the page of a plan.",
        )
    if schema != Result.schema:
        raise InputError(f"{file} has schema {schema!r}, not {Result.schema}.", hint=_AGAIN)
    try:
        # Earlier versions wrote secrets into the file.
        found = decode(Result, hidden_values(document))
    except DecodeError as error:
        raise InputError(f"{file} is damaged, or was written by another version: {error}.", hint=_AGAIN) from error
    # The directory may have been moved since.
    found = replace(found, output_directory=str(file.parent.absolute()))
    # The page does not require timelines.
    return found.with_moments(decoded(Timelines, file.with_name(TIMELINE)) or Timelines(None, None))
