"""Parses untrusted JSON with limits on depth and numbers; every bad text raises a ``ValueError``."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

MAX_DEPTH = 64
"""Maximum depth of JSON and YAML collections; functions on documents recurse, and Python limits their depth too."""


def read_json(text: str, *, finite: bool = True) -> Any:
    """Return the value of a JSON text.

    Args:
        finite: whether ``NaN`` and ``Infinity``, which JSON lacks, are refused; transformers writes them.

    Raises:
        ValueError: it is not JSON (``json.JSONDecodeError``), too deeply nested, or has a number that is too long or
            not finite.
    """
    to_float = _finite if finite else float
    try:
        value = json.loads(text, parse_float=to_float, parse_constant=to_float)
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise ValueError("a number has too many digits or is not finite") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    return value


def is_json(value: object) -> bool:
    """Return whether a value can be written as JSON."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _finite(digits: str) -> float:
    number = float(digits)
    if not isfinite(number):
        raise ValueError(digits)
    return number


def _depth(value: Any) -> int:
    """Return the depth of a value, at most :data:`MAX_DEPTH` + 1."""
    depth, level = 0, [value] if isinstance(value, (dict, list)) else []
    while level and depth <= MAX_DEPTH:
        depth += 1
        items = (each.values() if isinstance(each, dict) else each for each in level)
        level = [item for each in items for item in each if isinstance(item, (dict, list))]
    return depth
