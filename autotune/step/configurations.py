"""Values of configurations in JSON's types, and whether two of them mean the same."""

from __future__ import annotations

import dataclasses
import json
from enum import Enum
from typing import Any


def plain(value: Any) -> Any:
    """Return a field's value in JSON's types; what has none becomes text."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def same(asked: Any, used: Any) -> bool:
    """Whether a value has only been written in another way: JSON read, a list of one, a number as text, nothing."""
    if asked == used or (asked in (None, "none", "", [], {}) and not used):
        return True
    if isinstance(asked, str) and isinstance(used, dict):
        try:
            return bool(json.loads(asked) == used)
        except ValueError:
            return False
    if isinstance(asked, dict) and isinstance(used, dict):
        return all(used.get(key) == value for key, value in asked.items())
    if isinstance(asked, list) and isinstance(used, list):
        return len(asked) == len(used) and all(map(same, asked, used))
    return [asked] == used or asked == [used] or str(asked) == str(used)
