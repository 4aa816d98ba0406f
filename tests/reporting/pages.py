"""Results and plans as pages, for tests."""

from __future__ import annotations

from autotune.core.documents.estimate import Plan
from autotune.core.documents.result import Result
from autotune.reporting.document import Document
from autotune.reporting.page.html import html_page
from autotune.reporting.page.markdown import markdown_page
from autotune.reporting.plan import plan_report
from autotune.reporting.probe import probe_report


def html(found: Result | Plan) -> str:
    """Return the page of what a search found or a plan predicts."""
    return html_page(_report(found))


def markdown(found: Result | Plan) -> str:
    """Return the same as Markdown."""
    return markdown_page(_report(found))


def _report(found: Result | Plan) -> Document:
    return plan_report(found) if isinstance(found, Plan) else probe_report(found)
