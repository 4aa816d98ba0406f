"""Finds the line of the user's own code that a stack of calls leads through, and the line of a library below it."""

from __future__ import annotations

import linecache
import site
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

_HOOK = Path(__file__).resolve().parents[1]
_PACKAGES = ("site-packages", "dist-packages")
# Deeper than these, a line names an operator and not what it is for.
_OPERATORS = ("torch", "bitsandbytes", "triton")

Call = tuple[str, int, str]
"""File, line and function of a frame."""


def here() -> dict[str, Any]:
    """Return the place at which this thread is; in the backward pass, which has a thread of its own, the main one's."""
    own = place(_calls(sys._getframe(1)))
    if own["file"]:
        return own
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    outer = place(_calls(main)) if main is not None else own
    return {**outer, "within": own["within"] or outer["within"]}


def of_traceback(trace: TracebackType | None) -> dict[str, Any]:
    """Return the place from which an exception comes."""
    return place((frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_tb(trace))


def place(calls: Iterable[Call]) -> dict[str, Any]:
    """Return file, line, function and text of the deepest call in the user's own files, and the library's below it.

    Args:
        calls: outermost first.
    """
    found: dict[str, Any] = {"file": "", "line": 0, "function": "", "text": "", "within": ""}
    for file, line, function in calls:
        if _is_own(file):
            text = linecache.getline(file, line).strip()
            found = {"file": file, "line": line, "function": function, "text": text, "within": ""}
        elif (named := _in_package(file)) and named.split("/")[0] not in _OPERATORS:
            found["within"] = f"{named}:{line}, in {function}"
    return found


def _calls(frame: FrameType | None) -> list[Call]:
    walked = [(each.f_code.co_filename, line, each.f_code.co_name) for each, line in traceback.walk_stack(frame)]
    return walked[::-1]


def _is_own(file: str) -> bool:
    if file.startswith("<") or any(package in Path(file).parts for package in _PACKAGES):
        return False
    path = Path(file).resolve()
    return not any(path.is_relative_to(folder) for folder in _LIBRARIES)


def _in_package(file: str) -> str:
    """Return the path of a library's file from its package on; empty for another file."""
    parts = Path(file).parts
    place = max((parts.index(package) for package in _PACKAGES if package in parts), default=-1)
    return "/".join(parts[place + 1 :]) if place >= 0 else ""


def _libraries() -> tuple[Path, ...]:
    named = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    named += [*getattr(site, "getsitepackages", list)(), getattr(site, "getusersitepackages", str)()]
    return (_HOOK, *(Path(each).resolve() for each in named if each))


_LIBRARIES = _libraries()
