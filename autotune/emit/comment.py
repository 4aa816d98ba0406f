"""Formats comments of a bundle's files, and escapes names in them, such as a dataset's."""

from __future__ import annotations

import textwrap

from autotune.core.files.text import printable

_WIDTH = 100


def wrap_comment(sentence: str, first_prefix: str = "", other_prefix: str = "") -> str:
    """Return a sentence as lines of a comment.

    Args:
        first_prefix: prefix of the first line.
        other_prefix: prefix of the other lines.
    """
    return textwrap.fill(
        one_line(sentence),
        _WIDTH,
        initial_indent=first_prefix,
        subsequent_indent=other_prefix,
        break_long_words=False,
        break_on_hyphens=False,
    )


def one_line(sentence: str) -> str:
    """Return a sentence escaped so that it cannot end a YAML, shell or Python comment early."""
    return printable(sentence.replace("\n", " "))
