"""Replaces the characters of bars, plots and units where the encoding of a terminal lacks them."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterable

_NAME = "autotune-terminal"
_MARK = "?"
_SIMILAR = {
    **dict.fromkeys("─━╸╺", "-"),
    **dict.fromkeys("│┤", "|"),
    **dict.fromkeys("▏▎▍▌▋▊▉", "|"),  # the end of a bar
    **dict.fromkeys("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "*"),  # a spinner
    "└": "+", "█": "#", "·": ".", "○": "o", "●": "@", "…": "...", "±": "+-", "→": "->", "µ": "u",
}  # fmt: skip


def show_in_any_encoding(streams: Iterable[object]) -> None:
    """Let text streams write a similar text for each character that their encoding lacks, instead of failing."""
    codecs.register_error(_NAME, _similar)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_NAME)


def _similar(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_SIMILAR.get(letter, _MARK) for letter in lacking), error.end
