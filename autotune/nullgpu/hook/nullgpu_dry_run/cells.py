"""Measures the cells of Arrow arrays, whose values are not read: bytes of text, or elements of lists of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def has_length(kind: Any) -> bool:
    """Return whether cells of a type have text or elements; a structure with bytes is an image or a sound."""
    if pa.types.is_struct(kind):
        fields = [kind.field(index).type for index in range(kind.num_fields)]
        return not any(map(_is_binary, fields)) and any(map(has_length, fields))
    if _is_list(kind):
        return _is_number(kind.value_type) or has_length(kind.value_type)
    return _is_text(kind)


def has_bytes(kind: Any) -> bool:
    """Return whether cells of a type have bytes, which are an image or a sound."""
    if pa.types.is_struct(kind):
        return any(has_bytes(kind.field(index).type) for index in range(kind.num_fields))
    return has_bytes(kind.value_type) if _is_list(kind) else _is_binary(kind)


def has_text(kind: Any) -> bool:
    """Return whether the length of cells of a type is that of text, and not of a list of numbers."""
    if pa.types.is_struct(kind):
        return any(has_text(kind.field(index).type) for index in range(kind.num_fields))
    return has_text(kind.value_type) if _is_list(kind) else _is_text(kind)


def lengths(cells: Any) -> Any:
    """Return the lengths of an array's cells as a NumPy array; that of a structure is that of all in it."""
    kind = cells.type
    if not has_length(kind):
        return np.zeros(len(cells), dtype=np.int64)
    if pa.types.is_struct(kind):
        return sum(lengths(pc.struct_field(cells, [index])) for index in range(kind.num_fields))
    if _is_list(kind) and not _is_number(kind.value_type):
        inner = lengths(pc.list_flatten(cells))
        return np.bincount(pc.list_parent_indices(cells), inner, minlength=len(cells)).astype(np.int64)
    found = pc.list_value_length(cells) if _is_list(kind) else pc.binary_length(cells)
    return pc.fill_null(found, 0).to_numpy(zero_copy_only=False)


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_binary(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
