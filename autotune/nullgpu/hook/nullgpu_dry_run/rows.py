"""Measures the rows of a map-style dataset, so that the largest can be found: tokens, or bytes of text, of each row."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TOKENS = re.compile(r"(.*_)?ids")
_PROMPT = re.compile(r"prompt(_.*)?")
_ANSWERS = re.compile(r"(completion|chosen|rejected|answer|response)(_.*)?")
# Reading a row may decode an image or tokenise a text.
_MOST_SECONDS = 60.0


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
    return _of_fields(columns) if columns is not None else _by_reading(dataset)


def _columns(dataset: Any) -> dict[str, Any] | None:
    """Return the measured columns of a ``datasets.Dataset``; None for another one, or one that makes rows as it goes."""
    table, features = getattr(dataset, "data", None), getattr(dataset, "features", None)
    format_type = (getattr(dataset, "format", None) or {}).get("type")
    if features is None or not hasattr(table, "column_names") or format_type == "custom":
        return None
    plain = dataset.with_format("arrow")
    found: dict[str, list[tuple[int, str]]] = {name: [] for name in plain.column_names}
    for batch in plain.iter(batch_size=10_000):
        for name in found:
            found[name] += _arrow(batch.column(name))
    return found


def _arrow(column: Any) -> list[tuple[int, str]]:
    """Return size and unit of each cell of an Arrow column; structures of text have the size of all their text."""
    import pyarrow
    import pyarrow.compute

    kind = column.type
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        if pyarrow.types.is_integer(kind.value_type) or pyarrow.types.is_floating(kind.value_type):
            return [(length or 0, "elements") for length in pyarrow.compute.list_value_length(column).to_pylist()]
        return [_size(cell) for cell in column.to_pylist()]
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        return [(length or 0, "bytes of text") for length in pyarrow.compute.binary_length(column).to_pylist()]
    if pyarrow.types.is_struct(kind):
        return [_size(cell) for cell in column.to_pylist()]
    return [(0, "")] * len(column)


def _by_reading(dataset: Any) -> Sizes:
    """Measure rows by reading each of them."""
    began = time.monotonic()
    cells: dict[str, list[tuple[int, str]]] = {}
    for index in range(len(dataset)):
        row = dataset[index]
        fields = row if isinstance(row, Mapping) else dict(enumerate(row)) if isinstance(row, tuple) else {"": row}
        for name, value in fields.items():
            known = cells.setdefault(name if isinstance(name, str) else "", [])
            if len(known) > index:
                known[index] = max(known[index], _size(value))
            else:
                known.extend([(0, "")] * (index - len(known)))
                known.append(_size(value))
        if time.monotonic() - began > _MOST_SECONDS:
            raise UnmeasuredError(f"reading {len(dataset):,} rows takes more than {_MOST_SECONDS:.0f} s")
    for known in cells.values():
        known.extend([(0, "")] * (len(dataset) - len(known)))
    return _of_fields(cells)


def _of_fields(cells: Mapping[str, list[tuple[int, str]]]) -> Sizes:
    """Return the sizes of rows from those of their fields.

    Tokens come before text. Prompt and answer make one sequence, and of several answers the longest counts.
    """
    measured = {name: found for name, found in cells.items() if any(size for size, _ in found)}
    tokens = {name for name in measured if _TOKENS.fullmatch(name)}
    chosen = tokens or set(measured)
    if not chosen:
        raise UnmeasuredError("its rows have no field with a length")
    prompts = sorted(name for name in chosen if _PROMPT.fullmatch(name))[:1]
    answers = sorted(name for name in chosen if _ANSWERS.fullmatch(name))
    others = answers if prompts else sorted(chosen)
    unit = "tokens" if tokens else _unit(measured[name] for name in (*prompts, *others))
    lists = [[size for size, _ in measured[name]] for name in others]
    total = [max(each) for each in zip(*lists, strict=True)] if lists else [0] * len(measured[prompts[0]])
    for name in prompts:
        total = [size + more for size, (more, _) in zip(total, measured[name], strict=True)]
    words = [*prompts, *([" or ".join(others)] if others else [])]
    return Sizes(total, " + ".join(word for word in words if word), unit)


def _unit(fields: Any) -> str:
    units = {unit for found in fields for _, unit in found if unit}
    return units.pop() if len(units) == 1 else "elements"


def _size(value: Any) -> tuple[int, str]:
    """Return the size of a value and its unit; that of a structure is that of all text in it, or its length."""
    if isinstance(value, (str, bytes)):
        return len(value.encode(errors="replace")) if isinstance(value, str) else len(value), "bytes of text"
    if hasattr(value, "numel") or hasattr(value, "shape"):
        count = 1
        for dimension in value.shape:
            count *= int(dimension)
        return count, "elements"
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        if not value or not isinstance(value[0], (str, bytes, list, tuple, Mapping)):
            return len(value), "elements"
        return sum(_size(each)[0] for each in value), _size(value[0])[1]
    return 0, ""
