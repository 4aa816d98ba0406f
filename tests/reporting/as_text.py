"""Renders a document as plain text, for a console of a given width."""

from __future__ import annotations

import io

from rich.console import Console

from autotune.reporting.document import Document
from autotune.reporting.terminal import show


def as_text(document: Document, width: int = 100) -> str:
    """Return a document as it is printed, without trailing spaces."""
    file = io.StringIO()
    show(document, Console(file=file, width=width, highlight=False, color_system=None))
    assert not [line for line in file.getvalue().splitlines() if line.endswith(" ")]
    return file.getvalue()
