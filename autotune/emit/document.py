"""Writes ``core``'s dataclasses as JSON text, such as ``result.json``."""

from __future__ import annotations

import json
import re

from autotune.core.files.codec import encode

# JSON strings contain no line breaks, so this matches no list inside a string.
_NUMBERS = re.compile(r"\[\n([\d\s.,eE+-]+)\]")


def json_text(document: object) -> str:
    """Return a dataclass as JSON, keys in the order of its fields, with a newline at the end.

    A list of numbers is one line. A dataclass with a property ``written`` is replaced by the property's value.
    """
    written = encode(getattr(document, "written", document))
    text = json.dumps(written, indent=2, ensure_ascii=False, allow_nan=False)
    return _NUMBERS.sub(lambda match: f"[{' '.join(match[1].split())}]", text) + "\n"
