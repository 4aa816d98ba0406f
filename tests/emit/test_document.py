"""Documents as text."""

from __future__ import annotations

import json
from dataclasses import dataclass

from autotune.emit.document import json_text


@dataclass(frozen=True)
class _Document:
    numbers: tuple[float, ...] = (1, -2, 3.5e-07)
    one: tuple[int, ...] = (7,)
    none: tuple[int, ...] = ()
    names: tuple[str, ...] = ("[\n1,\n2\n]", "b")


def test_a_list_of_numbers_is_one_line_and_texts_are_left_alone() -> None:
    text = json_text(_Document())
    assert json.loads(text) == {"numbers": [1, -2, 3.5e-07], "one": [7], "none": [], "names": ["[\n1,\n2\n]", "b"]}
    assert '"numbers": [1, -2, 3.5e-07],' in text.splitlines()[1]
    assert '"one": [7],' in text
