"""The page about a search or a plan: one self-contained page of HTML, or Markdown for a pull request."""

from autotune.core.estimate import Plan
from autotune.core.result import Result
from autotune.reporting.page.html import html_page
from autotune.reporting.page.markdown import markdown_page
from autotune.reporting.page.plan_values import plan_values
from autotune.reporting.page.result_values import result_values
from autotune.reporting.page.values import Values

__all__ = ["html", "markdown"]


def html(document: Result | Plan) -> str:
    """Return the page of what a search found or a plan predicts."""
    return html_page(_values(document))


def markdown(document: Result | Plan) -> str:
    """Return the same as Markdown."""
    return markdown_page(_values(document))


def _values(document: Result | Plan) -> Values:
    return plan_values(document) if isinstance(document, Plan) else result_values(document)
