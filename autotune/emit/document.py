"""``result.json`` and its like: documents of ``core``'s dataclasses as JSON text."""

from __future__ import annotations

import json

from autotune.core.codec import encode


def json_text(document: object) -> str:
    """Return a dataclass as JSON, keys in the order of its fields, with a newline at the end.

    A dataclass that is not written in full has a property ``written``, which returns the part to write.
    """
    return (
        json.dumps(encode(getattr(document, "written", document)), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    )
