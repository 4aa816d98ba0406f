"""Measures each row of a map-style dataset in tokens, bytes of text or elements, to find the largest rows."""

from __future__ import annotations

import math
import re
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_TOKEN_IDS = re.compile(r"(.*_)?ids")
_PROMPT = re.compile(r"prompt(_.*)?")
# What a decoder is trained on, or the classes of a row.
_TARGET = re.compile(r"label[s]")
_COMPLETION = re.compile(r"(completion|chosen|rejected|answer|response)(_.*)?")
# Reading a row may decode an image or tokenise a text.
_MAX_SECONDS = 60.0
_CHUNK_ROWS = 10_000
_CHECKED_ELEMENTS = 8
"""Elements of a list that are checked for images: rows of tokens are long."""
_TEXT, _ELEMENTS = "bytes of text", "elements"


class UnmeasuredError(Exception):
    """The rows cannot be measured; the message gives the reason."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of the rows of a dataset.

    Attributes:
        rows: the size of each row, by its index.
        field: measured fields, such as ``prompt_ids + chosen_ids``; empty for rows without named fields.
        unit: ``tokens``, ``bytes of text`` or ``elements``.
        unmeasured: whether rows have images or audio, which the sizes leave out.
    """

    rows: Sequence[int]
    field: str
    unit: str
    unmeasured: bool = False


def measure_rows(dataset: Any, *, prompts_only: bool = False) -> Sizes:
    """Return the sizes of all rows.

    Args:
        prompts_only: leave out the dataset's completions, because the trainer generates its own.

    Raises:
        UnmeasuredError: the rows have no field with a length, or reading them takes too long.
    """
    inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is not None and isinstance(indices, Sequence):
        inner_sizes = measure_rows(inner, prompts_only=prompts_only)
        return replace(inner_sizes, rows=[inner_sizes.rows[index] for index in indices])
    columns = _arrow_columns(dataset)
    return _combine_columns(_read_columns(dataset) if columns is None else columns, prompts_only=prompts_only)


class Column:
    """The sizes of the cells of one field.

    Attributes:
        sizes: one per row.
        unit: unit of the last cell that had a size.
        unmeasured: whether cells have images or audio.
    """

    def __init__(self, unit: str = "") -> None:
        self.sizes = array("q")
        self.unit = unit
        self.unmeasured = False

    def add(self, row: int, size: int, unit: str) -> None:
        """Add the size of the field in a row; of several unnamed fields, the largest counts."""
        self.fill(row)
        if len(self.sizes) > row:
            self.sizes[row] = max(self.sizes[row], size)
        else:
            self.sizes.append(size)
        self.unit = unit or self.unit

    def fill(self, rows: int) -> None:
        """Add cells of size 0 up to a number of rows."""
        self.sizes.extend([0] * (rows - len(self.sizes)))


def _arrow_columns(dataset: Any) -> dict[str, Column] | None:
    """Return the measured columns of a ``datasets.Dataset``; None if a transform makes its rows, or it is no such."""
    table, features = getattr(dataset, "data", None), getattr(dataset, "features", None)
    format_type = (getattr(dataset, "format", None) or {}).get("type")
    if features is None or not hasattr(table, "column_names") or format_type == "custom":
        return None
    from .cells import has_bytes, has_length, has_text, lengths

    start_seconds = time.monotonic()
    plain = dataset.with_format("arrow")
    types = {name: plain.data.schema.field(name).type for name in plain.column_names}
    units = {name: _TEXT if has_text(dtype) else _ELEMENTS for name, dtype in types.items() if has_length(dtype)}
    columns = {name: Column(unit) for name, unit in units.items()}
    for batch in plain.select_columns(list(columns)).iter(batch_size=_CHUNK_ROWS):
        for name, column in columns.items():
            for chunk in batch.column(name).chunks:
                column.sizes.extend(lengths(chunk).tolist())
        _stop_after(start_seconds, len(dataset))
    for name, dtype in types.items():
        if has_bytes(dtype):
            columns.setdefault(name, Column()).unmeasured = True
    return columns


def _stop_after(start_seconds: float, rows: int) -> None:
    if time.monotonic() - start_seconds > _MAX_SECONDS:
        raise UnmeasuredError(f"reading {rows:,} rows takes more than {_MAX_SECONDS:.0f} s")


def _read_columns(dataset: Any) -> dict[str, Column]:
    """Measure the columns of a dataset by reading every row."""
    start_seconds = time.monotonic()
    columns: dict[str, Column] = {}
    for index in range(len(dataset)):
        row = dataset[index]
        fields = row if isinstance(row, Mapping) else dict(enumerate(row)) if isinstance(row, tuple) else {"": row}
        for name, value in fields.items():
            column = columns.setdefault(name if isinstance(name, str) else "", Column())
            column.add(index, *_size(value))
            column.unmeasured = column.unmeasured or _has_media(value)
        _stop_after(start_seconds, len(dataset))
    for column in columns.values():
        column.fill(len(dataset))
    return columns


def _combine_columns(columns: Mapping[str, Column], *, prompts_only: bool) -> Sizes:
    """Return the sizes of rows from the sizes of their fields.

    Token ids count instead of text if there are any. A prompt and its longest completion make one sequence. The
    decoder's tokens add to the input of the encoder.
    """
    measured = {name: column for name, column in columns.items() if any(column.sizes)}
    tokens = {name for name in measured if _TOKEN_IDS.fullmatch(name)}
    chosen = tokens or set(measured)
    if not chosen:
        raise UnmeasuredError("its rows have no field with a length")
    prompts = sorted(name for name in chosen if _PROMPT.fullmatch(name))[:1]
    others = sorted(name for name in chosen if not prompts or (_COMPLETION.fullmatch(name) and not prompts_only))
    targets = [] if prompts else _decoder_targets(measured, others)
    others = [name for name in others if name not in targets]
    units = {measured[name].unit for name in (*prompts, *others, *targets)}
    parts = [[measured[name].sizes for name in names] for names in (prompts, others, targets) if names]
    rows = [array("q", map(max, *part)) if len(part) > 1 else part[0] for part in parts]
    total = array("q", map(sum, zip(*rows, strict=True))) if len(rows) > 1 else rows[0]
    unit = "tokens" if tokens else units.pop() if len(units) == 1 else _ELEMENTS
    fields = " + ".join(filter(None, (*prompts, " or ".join(others), *targets)))
    unmeasured = any(column.unmeasured for column in columns.values())
    return Sizes(total, fields, unit, unmeasured)


def _decoder_targets(measured: Mapping[str, Column], chosen: Sequence[str]) -> list[str]:
    """Return the field of a decoder's tokens: lists of other lengths than all inputs have; none for a decoder alone."""
    inputs = [measured[name] for name in chosen if not _TARGET.fullmatch(name)]
    return [
        name
        for name, column in measured.items()
        if _TARGET.fullmatch(name)
        and inputs
        and max(column.sizes) > 1
        and all(column.unit == each.unit and column.sizes != each.sizes for each in inputs)
    ]


def _has_media(value: Any) -> bool:
    """Return whether a value contains bytes or a Pillow image."""
    if isinstance(value, (list, tuple, Mapping)):
        return any(map(_has_media, value.values() if isinstance(value, Mapping) else value[:_CHECKED_ELEMENTS]))
    # Pillow's images have a string as ``mode``.
    return isinstance(value, bytes) or isinstance(getattr(value, "mode", None), str)


def _size(value: Any) -> tuple[int, str]:
    """Return the size of a value and its unit; nested texts are summed, and other lists have their length."""
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
