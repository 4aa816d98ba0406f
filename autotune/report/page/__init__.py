"""The page about a search or a plan: one self-contained page of HTML, or Markdown for a pull request."""

from autotune.core.result import Result
from autotune.report.page.html import html_page
from autotune.report.page.markdown import markdown_page
from autotune.report.page.result_values import result_values

__all__ = ["html", "markdown"]


def html(document: Result) -> str:
    """Return the page of a result."""
    return html_page(result_values(document))


def markdown(document: Result) -> str:
    """Return the same as Markdown."""
    return markdown_page(result_values(document))
