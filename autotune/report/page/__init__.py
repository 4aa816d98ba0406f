"""The report of a run: one self-contained page of HTML, or Markdown for a pull request."""

from autotune.report.page.html import html
from autotune.report.page.markdown import markdown

__all__ = ["html", "markdown"]
