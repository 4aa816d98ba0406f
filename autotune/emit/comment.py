"""Writes comments into the files of a bundle; names in them, such as a dataset's, may contain any character."""

from __future__ import annotations

import textwrap

from autotune.core.text import printable

_WIDTH = 100


def filled(sentence: str, first: str = "", further: str = "") -> str:
    """Return a sentence as lines of a comment.

    Args:
        first: prefix of the first line.
        further: prefix of the other lines.
    """
    return textwrap.fill(
        one_line(sentence),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def one_line(sentence: str) -> str:
    """Return a sentence escaped so that it cannot end a YAML, shell or Python comment early."""
    return printable(sentence.replace("\n", " "))
