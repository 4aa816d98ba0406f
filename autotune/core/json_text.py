"""Reads untrusted JSON with limits on its depth and its numbers, so that no text causes an internal error."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 64
"""Collections inside one another, of JSON and of YAML; what works on a document recurses, so Python's own limit is not
far above."""


def read_json(text: str | bytes) -> Any:
    """Return the value that a JSON text is.

    Raises:
        ValueError: it is no JSON (a ``json.JSONDecodeError`` or a ``UnicodeDecodeError``), is nested too deeply, or has
            a number that is too long.
    """
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError as error:
        raise ValueError("a number has too many digits") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if _opened(text) > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    return value


def is_json(value: object) -> bool:
    """Return whether JSON has a value."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _opened(text: str | bytes) -> int:
    return text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")


def _depth(value: Any) -> int:
    """Return the depth of a value, or one that is too deep, whichever is less."""
    depth, level = 0, [value] if isinstance(value, (dict, list)) else []
    while level and depth <= MAX_DEPTH:
        depth += 1
        items = (each.values() if isinstance(each, dict) else each for each in level)
        level = [item for each in items for item in each if isinstance(item, (dict, list))]
    return depth
