"""Measures the rows of a map-style dataset, so that the largest can be found: tokens, or bytes of text, of each row."""

from __future__ import annotations

import math
import re
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TOKENS = re.compile(r"(.*_)?ids")
_PROMPT = re.compile(r"prompt(_.*)?")
_ANSWERS = re.compile(r"(completion|chosen|rejected|answer|response)(_.*)?")
# Reading a row may decode an image or tokenise a text.
_MOST_SECONDS = 60.0
_AT_ONCE = 10_000
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
    """

    rows: Sequence[int]
    field: str
    unit: str


def sizes(dataset: Any) -> Sizes:
    """Return the sizes of all rows.

    Raises:
        UnmeasuredError: the rows have nothing that can be measured, or reading them takes too long.
    """
    inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is not None and isinstance(indices, Sequence):
        found = sizes(inner)
        return Sizes([found.rows[index] for index in indices], found.field, found.unit)
    columns = _columns(dataset)
    return _of_columns(columns) if columns is not None else _by_reading(dataset)


class Column:
    """The sizes of the cells of one field.

    Attributes:
        sizes: one for each row.
        unit: of the last cell that had a size.
    """

    def __init__(self) -> None:
        self.sizes = array("q")
        self.unit = ""

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
    plain = dataset.with_format("arrow")
    found = {name: Column() for name in plain.column_names}
    for batch in plain.iter(batch_size=_AT_ONCE):
        for name, column in found.items():
            measured, unit = _arrow(batch.column(name))
            column.sizes.extend(measured)
            column.unit = unit or column.unit
    return found


def _arrow(column: Any) -> tuple[list[int], str]:
    """Return the sizes of the cells of an Arrow column and their unit; a structure has the size of the text in it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    nested = pa.types.is_struct(kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type):
            return [length or 0 for length in pc.list_value_length(column).to_pylist()], _ELEMENTS
        nested = True
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return [length or 0 for length in pc.binary_length(column).to_pylist()], _TEXT
    if nested:
        measured = [_size(cell) for cell in column.to_pylist()]
        return [size for size, _ in measured], next((unit for _, unit in measured if unit), "")
    return [0] * len(column), ""


def _by_reading(dataset: Any) -> Sizes:
    """Measure rows by reading each of them."""
    began = time.monotonic()
    columns: dict[str, Column] = {}
    for index in range(len(dataset)):
        row = dataset[index]
        fields = row if isinstance(row, Mapping) else dict(enumerate(row)) if isinstance(row, tuple) else {"": row}
        for name, value in fields.items():
            columns.setdefault(name if isinstance(name, str) else "", Column()).add(index, *_size(value))
        if time.monotonic() - began > _MOST_SECONDS:
            raise UnmeasuredError(f"reading {len(dataset):,} rows takes more than {_MOST_SECONDS:.0f} s")
    for column in columns.values():
        column.fill(len(dataset))
    return _of_columns(columns)


def _of_columns(columns: Mapping[str, Column]) -> Sizes:
    """Return the sizes of rows from those of their fields.

    Tokens come before text. Prompt and answer make one sequence, and of several answers the longest counts.
    """
    measured = {name: column for name, column in columns.items() if any(column.sizes)}
    tokens = {name for name in measured if _TOKENS.fullmatch(name)}
    chosen = tokens or set(measured)
    if not chosen:
        raise UnmeasuredError("its rows have no field with a length")
    prompts = sorted(name for name in chosen if _PROMPT.fullmatch(name))[:1]
    others = sorted(name for name in chosen if not prompts or _ANSWERS.fullmatch(name))
    units = {measured[name].unit for name in (*prompts, *others)}
    parts = [[measured[name].sizes for name in names] for names in (prompts, others) if names]
    rows = [array("q", map(max, *part)) if len(part) > 1 else part[0] for part in parts]
    total = array("q", map(sum, zip(*rows, strict=True))) if len(rows) > 1 else rows[0]
    unit = "tokens" if tokens else units.pop() if len(units) == 1 else _ELEMENTS
    return Sizes(total, " + ".join(filter(None, (*prompts, " or ".join(others)))), unit)


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
