"""A minimal terminal emulator for rich's control codes: the screen after a text was sent to it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKENS = re.compile(r"\x1b\[(?P<arguments>[0-9;?]*)(?P<code>[A-Za-z])|[^\x1b]")


@dataclass
class Screen:
    """The lines of a screen without end, the place of its cursor, and whether that is visible."""

    columns: int
    lines: list[str]
    row: int = 0
    column: int = 0
    cursor: bool = True
    wrapped: bool = False


def screen(sent: str, columns: int) -> Screen:
    """Return the screen after a text."""
    shown = Screen(columns, [""])
    for token in _TOKENS.finditer(sent):
        if token["code"]:
            _obey(shown, token["code"], token["arguments"])
        elif token[0] == "\r":
            shown.column = 0
        elif token[0] == "\n":
            _down(shown)
        else:
            _put(shown, token[0])
    return shown


def _obey(shown: Screen, code: str, arguments: str) -> None:
    if code == "A":
        shown.row = max(0, shown.row - int(arguments or 1))
    elif code == "K":
        assert arguments == "2"
        shown.lines[shown.row] = ""
    elif code in "hl":
        assert arguments == "?25"
        shown.cursor = code == "h"
    else:
        assert code == "m", code


def _put(shown: Screen, character: str) -> None:
    if shown.column == shown.columns:
        shown.wrapped = True
        shown.column = 0
        _down(shown)
    line = shown.lines[shown.row].ljust(shown.column)
    shown.lines[shown.row] = line[: shown.column] + character + line[shown.column + 1 :]
    shown.column += 1


def _down(shown: Screen) -> None:
    shown.row += 1
    if shown.row == len(shown.lines):
        shown.lines.append("")
