"""Measures the rows of a map-style dataset, so that the largest can be found: tokens, or bytes of text, of each row."""

from __future__ import annotations

import math
import re
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_TOKENS = re.compile(r"(.*_)?ids")
_PROMPT = re.compile(r"prompt(_.*)?")
_ANSWERS = re.compile(r"(completion|chosen|rejected|answer|response)(_.*)?")
# Reading a row may decode an image or tokenise a text.
_MOST_SECONDS = 60.0
_AT_ONCE = 10_000
_FEW = 8
"""Elements of a list that are checked for images: rows of tokens are long."""
_TEXT, _ELEMENTS = "bytes of text", "elements"


class UnmeasuredError(Exception):
    """The rows cannot be measured; the message gives the reason."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of the rows of a dataset.

    Attributes:
        rows: the size of each row, by its index.
        field: what was measured, such as ``prompt_ids + chosen_ids``; empty for rows without named fields.
        unit: ``tokens``, ``bytes of text`` or ``elements``.
        unmeasured: whether rows have images or sounds, which are left out.
    """

    rows: Sequence[int]
    field: str
    unit: str
    unmeasured: bool = False


def sizes(dataset: Any, *, of_prompts: bool = False) -> Sizes:
    """Return the sizes of all rows.

    Args:
        of_prompts: whether the answers to prompts are generated, so that those in the dataset do not count.

    Raises:
        UnmeasuredError: the rows have nothing that can be measured, or reading them takes too long.
    """
    inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is not None and isinstance(indices, Sequence):
        found = sizes(inner, of_prompts=of_prompts)
        return replace(found, rows=[found.rows[index] for index in indices])
    columns = _columns(dataset)
    return _of_columns(_by_reading(dataset) if columns is None else columns, of_prompts=of_prompts)


class Column:
    """The sizes of the cells of one field.

    Attributes:
        sizes: one for each row.
        unit: of the last cell that had a size.
        unmeasured: whether it has images or sounds.
    """

    def __init__(self, unit: str = "") -> None:
        self.sizes = array("q")
        self.unit = unit
        self.unmeasured = False

    def add(self, row: int, size: int, unit: str) -> None:
        """Add the size of the field in a row; of several fields without a name, the largest counts."""
        self.fill(row)
        if len(self.sizes) > row:
            self.sizes[row] = max(self.sizes[row], size)
        else:
            self.sizes.append(size)
        self.unit = unit or self.unit

    def fill(self, rows: int) -> None:
        """Add empty cells up to a number of rows."""
        self.sizes.extend([0] * (rows - len(self.sizes)))


def _columns(dataset: Any) -> dict[str, Column] | None:
    """Return the measured columns of a ``datasets.Dataset``; None for one that makes rows as it goes."""
    table, features = getattr(dataset, "data", None), getattr(dataset, "features", None)
    format_type = (getattr(dataset, "format", None) or {}).get("type")
    if features is None or not hasattr(table, "column_names") or format_type == "custom":
        return None
    from .cells import has_bytes, has_length, has_text, lengths

    began = time.monotonic()
    plain = dataset.with_format("arrow")
    kinds = {name: plain.data.schema.field(name).type for name in plain.column_names}
    found = {name: Column(_TEXT if has_text(kind) else _ELEMENTS) for name, kind in kinds.items() if has_length(kind)}
    for batch in plain.select_columns(list(found)).iter(batch_size=_AT_ONCE):
        for name, column in found.items():
            for chunk in batch.column(name).chunks:
                column.sizes.extend(lengths(chunk).tolist())
        _stop_after(began, len(dataset))
    for name, kind in kinds.items():
        if has_bytes(kind):
            found.setdefault(name, Column()).unmeasured = True
    return found


def _stop_after(began: float, rows: int) -> None:
    if time.monotonic() - began > _MOST_SECONDS:
        raise UnmeasuredError(f"reading {rows:,} rows takes more than {_MOST_SECONDS:.0f} s")


def _by_reading(dataset: Any) -> dict[str, Column]:
    """Measure rows by reading each of them."""
    began = time.monotonic()
    columns: dict[str, Column] = {}
    for index in range(len(dataset)):
        row = dataset[index]
        fields = row if isinstance(row, Mapping) else dict(enumerate(row)) if isinstance(row, tuple) else {"": row}
        for name, value in fields.items():
            column = columns.setdefault(name if isinstance(name, str) else "", Column())
            column.add(index, *_size(value))
            column.unmeasured = column.unmeasured or _is_pictured(value)
        _stop_after(began, len(dataset))
    for column in columns.values():
        column.fill(len(dataset))
    return columns


def _of_columns(columns: Mapping[str, Column], *, of_prompts: bool) -> Sizes:
    """Return the sizes of rows from those of their fields.

    Tokens come before text. Prompt and answer make one sequence, and of several answers the longest counts.
    """
    measured = {name: column for name, column in columns.items() if any(column.sizes)}
    tokens = {name for name in measured if _TOKENS.fullmatch(name)}
    chosen = tokens or set(measured)
    if not chosen:
        raise UnmeasuredError("its rows have no field with a length")
    prompts = sorted(name for name in chosen if _PROMPT.fullmatch(name))[:1]
    others = sorted(name for name in chosen if not prompts or (_ANSWERS.fullmatch(name) and not of_prompts))
    units = {measured[name].unit for name in (*prompts, *others)}
    parts = [[measured[name].sizes for name in names] for names in (prompts, others) if names]
    rows = [array("q", map(max, *part)) if len(part) > 1 else part[0] for part in parts]
    total = array("q", map(sum, zip(*rows, strict=True))) if len(rows) > 1 else rows[0]
    unit = "tokens" if tokens else units.pop() if len(units) == 1 else _ELEMENTS
    unmeasured = any(column.unmeasured for column in columns.values())
    return Sizes(total, " + ".join(filter(None, (*prompts, " or ".join(others)))), unit, unmeasured)


def _is_pictured(value: Any) -> bool:
    """Return whether a value has bytes, or an image of Pillow's."""
    if isinstance(value, (list, tuple, Mapping)):
        return any(map(_is_pictured, value.values() if isinstance(value, Mapping) else value[:_FEW]))
    # A tensor has a method of this name.
    return isinstance(value, bytes) or isinstance(getattr(value, "mode", None), str)


def _size(value: Any) -> tuple[int, str]:
    """Return the size of a value and its unit; that of a structure is that of all text in it, or its length."""
    if isinstance(value, str):
        return len(value.encode(errors="replace")), _TEXT
    if hasattr(value, "shape"):
        return math.prod(map(int, value.shape)), _ELEMENTS
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        if not value or not isinstance(value[0], (str, list, tuple, Mapping)):
            return len(value), _ELEMENTS
        return sum(_size(each)[0] for each in value), _size(value[0])[1]
    return 0, ""
