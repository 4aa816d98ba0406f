"""Finds the deepest line of the user's own code in a stack of calls, and the deepest line of a library below it."""

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
# Packages whose frames are skipped: they name an operator, not its purpose.
_OPERATORS = ("torch", "bitsandbytes", "triton")

Call = tuple[str, int, str]
"""File, line and function of a frame."""


def here() -> dict[str, Any]:
    """Return the current source line of this thread; of the main thread within autograd's threads."""
    innermost = place(_calls(sys._getframe(1)))
    if innermost["file"]:
        return innermost
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    outer = place(_calls(main)) if main is not None else innermost
    return {**outer, "within": innermost["within"] or outer["within"]}


def of_traceback(trace: TracebackType | None) -> dict[str, Any]:
    """Return the source line that raised an exception."""
    return place((frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in traceback.walk_tb(trace))


def place(calls: Iterable[Call]) -> dict[str, Any]:
    """Return the deepest call in the user's own files, and the library's line below it, as ``SourceLine``'s fields.

    Args:
        calls: outermost first.
    """
    found: dict[str, Any] = {"file": "", "line": 0, "function": "", "text": "", "within": ""}
    for file, line, function in calls:
        if _is_user_file(file):
            text = linecache.getline(file, line).strip()
            found = {"file": file, "line": line, "function": function, "text": text, "within": ""}
        elif (library_file := _path_in_package(file)) and library_file.split("/")[0] not in _OPERATORS:
            found["within"] = f"{library_file}:{line}, in {function}"
    return found


def _calls(frame: FrameType | None) -> list[Call]:
    walked = [(each.f_code.co_filename, line, each.f_code.co_name) for each, line in traceback.walk_stack(frame)]
    return walked[::-1]


def _is_user_file(file: str) -> bool:
    if file.startswith("<") or any(package in Path(file).parts for package in _PACKAGES):
        return False
    path = Path(file).resolve()
    return not any(path.is_relative_to(folder) for folder in _LIBRARIES)


def _path_in_package(file: str) -> str:
    """Return the path of a library's file, from its package on; empty for a file outside libraries."""
    parts = Path(file).parts
    index = max((parts.index(package) for package in _PACKAGES if package in parts), default=-1)
    return "/".join(parts[index + 1 :]) if index >= 0 else ""


def _libraries() -> tuple[Path, ...]:
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*getattr(site, "getsitepackages", list)(), getattr(site, "getusersitepackages", str)()]
    return (_HOOK, *(Path(each).resolve() for each in folders if each))


_LIBRARIES = _libraries()
