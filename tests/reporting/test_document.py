"""Terminal, HTML and Markdown show every sentence and figure of a report."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape

import pytest

from autotune.core.documents.estimate import Plan
from autotune.core.documents.result import Result
from autotune.reporting import document as doc
from autotune.reporting.plan import plan_report
from autotune.reporting.probe import probe_report
from tests.reporting.as_text import as_text
from tests.reporting.examples import a_result, interrupted, nothing_fits, only_the_default_fits
from tests.reporting.pages import html, markdown
from tests.reporting.plans import DEFAULT, UNKNOWN, a_plan
from tests.reporting.test_own_file_drawn import own
from tests.reporting.test_page import own as own_part

FOUND: dict[str, Result | Plan] = {
    "found": a_result(), "own file": own(), "nothing fits": nothing_fits(), "only the default": only_the_default_fits(),
    "interrupted": interrupted(), "plan": a_plan(), "plan that does not fit": a_plan(estimates=(DEFAULT, UNKNOWN)),
}  # fmt: skip
EVERY = pytest.mark.parametrize("found", FOUND.values(), ids=FOUND)


def report(found: Result | Plan, top: int | None = None) -> doc.Document:
    return plan_report(found, top) if isinstance(found, Plan) else probe_report(found)


def texts(document: doc.Document, medium: doc.Medium) -> Iterator[str]:
    """Yield the sentences and figures of the sections of a medium."""
    assert document.verdict is not None
    yield from (document.subject, document.verdict.headline, document.verdict.choices)
    yield from (remark.text for remark in document.verdict.remarks)
    for section in document.sections:
        if section.medium in (doc.Medium.EVERYWHERE, medium):
            yield section.title if section.heading else ""
            for block in section.blocks:
                yield from texts_of(block)


def texts_of(block: doc.Block) -> Iterator[str]:
    match block:
        case doc.Paragraph() | doc.Snippet():
            yield block.text
        case doc.Listing():
            yield block.lead
            for line in block.lines:
                yield from map(str_of, (line,) if isinstance(line, str) else line)
        case doc.Table():
            yield from block.columns
            yield from (str_of(cell) for row in block.rows for cell in row)
        case doc.Facts():
            yield from (text for pair in block.pairs for text in pair)
        case doc.Diff():
            yield from block.text.splitlines()
        case doc.Candidates():
            yield from (block.counts, *block.lines)


def rows_of(document: doc.Document) -> Iterator[str]:
    """Yield the candidates with their figures."""
    for block in document.blocks(doc.Candidates):
        for row in block.rows:
            yield from (row.name, row.reason, *row.cells)


def str_of(cell: doc.Cell) -> str:
    return "" if isinstance(cell, doc.Bar) else cell.text if isinstance(cell, doc.Code) else cell


def words(text: str) -> str:
    return " ".join(text.split())


def missing(wanted: Iterator[str], drawn: str) -> list[str]:
    return [text for text in wanted if words(text) not in words(drawn)]


@EVERY
def test_a_terminal_draws_all_of_it(found: Result | Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    document = report(found, top=20)
    drawn = as_text(document, width=400)
    assert missing(texts(document, doc.Medium.TERMINAL), drawn) == []
    if isinstance(found, Plan):
        assert missing(rows_of(document), drawn) == []


@EVERY
def test_a_page_draws_all_of_it(found: Result | Plan) -> None:
    drawn = unescape(re.sub(r"<[^>]*>", " ", own_part(html(found))))
    assert missing(texts(report(found), doc.Medium.PAGES), drawn) == []
    assert missing(rows_of(report(found)), drawn) == []


@EVERY
def test_markdown_draws_all_of_it(found: Result | Plan) -> None:
    drawn = markdown(found).replace("\\", "")
    assert missing(texts(report(found), doc.Medium.PAGES), drawn) == []
    if isinstance(found, Plan):
        assert missing(rows_of(report(found)), drawn) == []
