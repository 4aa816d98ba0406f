"""Checks and compares values of configuration dataclasses' fields, and converts them to JSON's types."""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from autotune.core.configuration import Override
from autotune.core.files.json_text import read_json

_MAX_EXCERPT_CHARACTERS = 80
# Text that transformers' parser accepts as a boolean (string_to_bool).
_BOOLEAN_TEXTS = frozenset({"yes", "true", "t", "y", "1", "no", "false", "f", "n", "0"})


def excerpt(value: object) -> str:
    """Return a value as JSON, in ASCII, for a message."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= _MAX_EXCERPT_CHARACTERS else f"{text[:_MAX_EXCERPT_CHARACTERS]}…"


_TYPE_WORDS: Mapping[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def mismatch(hint: Any, value: Any) -> str:
    """Return a description of the values that a field accepts, or an empty string if it accepts the value.

    Text is accepted if argparse, or the class itself (JSON for a mapping), converts it.
    """
    kinds = _alternatives(hint)
    # A key without a value is null in YAML; the class decides whether it accepts that.
    if value is None or any(_accepts(alternative, value) for alternative in kinds):
        return ""
    words = [_describe_type(alternative) for alternative in kinds if alternative is not type(None)]
    return " or ".join(dict.fromkeys(words))


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(alternative for item in get_args(hint) for alternative in _alternatives(item))
    return (hint,)


def _describe_type(alternative: Any) -> str:
    origin = get_origin(alternative) or alternative
    if origin is Literal:
        return ", ".join(map(str, get_args(alternative)))
    if isinstance(origin, type) and issubclass(origin, Enum):
        return ", ".join(str(member.value) for member in origin)
    if origin is list:
        (item, *_) = (*get_args(alternative), Any)
        return f"a list, each item {_describe_type(item)}" if dataclasses.is_dataclass(item) else "a list"
    if dataclasses.is_dataclass(origin):
        return f"a mapping with {', '.join(field.name for field in dataclasses.fields(origin))}"
    return _TYPE_WORDS.get(origin, "a mapping" if origin is dict else "another value")


def _accepts(alternative: Any, value: Any) -> bool:
    origin = get_origin(alternative) or alternative
    if origin is bool:
        return isinstance(value, bool) or str(value).lower() in _BOOLEAN_TEXTS
    if isinstance(value, bool):
        return origin in (str, Any)
    if origin in (int, float):
        return _is_number(origin, value)
    if origin in (list, dict):
        return _accepts_items(alternative, origin, value)
    if origin is Literal:
        return value in get_args(alternative)
    if isinstance(origin, type) and issubclass(origin, Enum):
        return value in [member.value for member in origin]
    if dataclasses.is_dataclass(origin):
        return _can_be_made(origin, value)
    return origin is not type(None) and not (origin is str and isinstance(value, (dict, list)))


def _can_be_made(kind: Any, value: Any) -> bool:
    """Whether a mapping has the arguments that a dataclass needs, and no others."""
    try:
        inspect.signature(kind).bind(**value)
    except TypeError:
        return False
    return True


def _accepts_items(alternative: Any, origin: type, value: Any) -> bool:
    """Whether a list or mapping field accepts a value; the classes parse JSON text for mappings."""
    if origin is dict:
        return isinstance(value, dict) or (isinstance(value, str) and value.lstrip().startswith("{"))
    items = _alternatives((*get_args(alternative), Any)[0])
    return isinstance(value, list) and all(any(_accepts(item_type, item) for item_type in items) for item in value)


def _is_number(alternative: type, value: Any) -> bool:
    if isinstance(value, (int, float)):
        return alternative is float or float(value).is_integer()
    if not isinstance(value, str):
        return False
    if value.lower() in ("none", "null"):
        return True
    try:
        alternative(value)
    except ValueError:
        return False
    return True


def plain(value: Any) -> Any:
    """Return a field's value in JSON's types; values without a JSON type become text."""
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


def same(given: Any, used: Any) -> bool:
    """Whether two values differ only in spelling: JSON, a list of one, a number as text, null."""
    if given == used or (given in (None, "none", ["none"], "", [], {}) and not used):
        return True
    if isinstance(given, str) and isinstance(used, dict):
        # JSON, or the name of its file.
        try:
            given = read_json(Path(given).read_text(encoding="utf-8") if given.endswith(".json") else given)
        except (OSError, ValueError):
            return False
    if isinstance(given, dict) and isinstance(used, dict):
        # transformers accepts FSDP's keys with and without the prefix (training_args.py, `_process_fsdp_args`).
        return all(same(value, used.get(key, used.get(key.removeprefix("fsdp_")))) for key, value in given.items())
    if isinstance(given, list) and isinstance(used, list):
        return len(given) == len(used) and all(map(same, given, used))
    return [given] == used or given == [used] or str(given) == str(used)


def overrides(given: Mapping[str, Any], used: Mapping[str, Any], unset: Collection[str] = ()) -> Iterator[Override]:
    """Yield the fields whose used value differs from the given one, in their order.

    Args:
        unset: fields whose default is null: writing null there is the same as leaving the field out.
    """
    for name in filter(given.__contains__, used):
        before, after = plain(given[name]), plain(used[name])
        if not (same(before, after) or (before is None and name in unset)):
            yield Override(name, before, after)
