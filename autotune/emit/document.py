"""``result.json`` and its like: documents of ``core``'s dataclasses as JSON text."""

from __future__ import annotations

import json
import re

from autotune.core.codec import encode

# No string has a line break in JSON, so nothing inside of one is taken for a list.
_NUMBERS = re.compile(r"\[\n([\d\s.,eE+-]+)\]")


def json_text(document: object) -> str:
    """Return a dataclass as JSON, keys in the order of its fields, with a newline at the end.

    A list of numbers is one line. A dataclass that is not written in full has a property ``written``, which returns the
    part to write.
    """
    written = encode(getattr(document, "written", document))
    text = json.dumps(written, indent=2, ensure_ascii=False, allow_nan=False)
    return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"
