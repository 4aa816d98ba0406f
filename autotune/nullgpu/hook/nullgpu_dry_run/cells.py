"""Measures the cells of Arrow arrays from their offsets alone: bytes of text, or elements of lists of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def has_length(dtype: Any) -> bool:
    """Return whether cells of a type have text or numbers to measure; a struct with binary fields is media."""
    if pa.types.is_struct(dtype):
        fields = [dtype.field(index).type for index in range(dtype.num_fields)]
        return not any(map(_is_binary, fields)) and any(map(has_length, fields))
    if _is_list(dtype):
        return _is_number(dtype.value_type) or has_length(dtype.value_type)
    return _is_text(dtype)


def has_bytes(dtype: Any) -> bool:
    """Return whether cells of a type contain binary data, which is an image or audio."""
    if pa.types.is_struct(dtype):
        return any(has_bytes(dtype.field(index).type) for index in range(dtype.num_fields))
    return has_bytes(dtype.value_type) if _is_list(dtype) else _is_binary(dtype)


def has_text(dtype: Any) -> bool:
    """Return whether the lengths of cells of a type are bytes of text, rather than elements of lists."""
    if pa.types.is_struct(dtype):
        return any(has_text(dtype.field(index).type) for index in range(dtype.num_fields))
    return has_text(dtype.value_type) if _is_list(dtype) else _is_text(dtype)


def lengths(cells: Any) -> Any:
    """Return the lengths of an array's cells as a NumPy array; a struct's length is the sum over its fields."""
    dtype = cells.type
    if not has_length(dtype):
        return np.zeros(len(cells), dtype=np.int64)
    if pa.types.is_struct(dtype):
        return sum(lengths(pc.struct_field(cells, [index])) for index in range(dtype.num_fields))
    if _is_list(dtype) and not _is_number(dtype.value_type):
        inner = lengths(pc.list_flatten(cells))
        return np.bincount(pc.list_parent_indices(cells), inner, minlength=len(cells)).astype(np.int64)
    found = pc.list_value_length(cells) if _is_list(dtype) else pc.binary_length(cells)
    return pc.fill_null(found, 0).to_numpy(zero_copy_only=False)


def _is_text(dtype: Any) -> bool:
    return bool(pa.types.is_string(dtype) or pa.types.is_large_string(dtype))


def _is_list(dtype: Any) -> bool:
    return bool(pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype))


def _is_number(dtype: Any) -> bool:
    return bool(pa.types.is_integer(dtype) or pa.types.is_floating(dtype))


def _is_binary(dtype: Any) -> bool:
    return bool(pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype))
