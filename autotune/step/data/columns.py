"""Checks the values of the columns that a trainer reads."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, List

from autotune.core.workload import DatasetSource
from autotune.errors import InputError


def check_complete(source: DatasetSource, rows: Dataset, column: str) -> None:
    """Check that each row has a value in a column.

    Raises:
        InputError: one has null, or no messages.
    """
    values = rows.with_format("arrow")[:][column]
    is_missing = pc.is_null(values)
    element_type = values.type.value_type if pa.types.is_list(values.type) else None
    if element_type is not None and (pa.types.is_struct(element_type) or pa.types.is_null(element_type)):
        # TRL reads the first message of each row.
        is_missing = pc.or_(is_missing, pc.fill_null(pc.equal(pc.list_value_length(values), 0), fill_value=False))
    count = pc.sum(is_missing).as_py()
    if count:
        row = pc.index(is_missing, True).as_py() + 1
        counted = "counted from 1, without the header" if source.path == "csv" else "counted from 1"
        lacking = f"{count:,} of {len(rows):,} rows"
        raise InputError(
            f"{source.name} has no {column} in {lacking}, the first of which is row {row:,} ({counted}).",
            hint="Remove or complete them.",
        )


def with_token_lists(source: DatasetSource, rows: Dataset, column: str, *, flags: bool = False) -> Dataset:
    """Return rows whose column holds lists of whole numbers, all of whose lengths may differ.

    Args:
        flags: whether the lists may also hold true or false, null, or numbers that are not whole.

    Raises:
        InputError: the column holds something else.
    """
    kind = rows.data.schema.field(column).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    wanted = [pa.types.is_integer, *([pa.types.is_boolean, pa.types.is_floating] if flags else [])]
    if not (is_list and any(is_wanted(kind.value_type) for is_wanted in wanted)):
        raise InputError(
            f"{source.name} has values of the type {kind} in {column}, where TRL reads a list of numbers, one a token.",
            hint="Write such lists as JSON lines or Parquet, or rename the column.",
        )
    if not flags and pc.list_flatten(rows.select_columns([column]).with_format("arrow")[:][column]).null_count:
        row = next(number for number, tokens in enumerate(rows[column], start=1) if tokens and None in tokens)
        raise InputError(
            f"Row {row:,} (counted from 1) of {source.name} has null among its {column}: training fails at it.",
            hint="Write a number for each token.",
        )
    if not pa.types.is_fixed_size_list(kind):
        return rows
    return rows.cast_column(column, List(rows.features[column].feature))


def check_numbers(source: DatasetSource, rows: Dataset, column: str) -> None:
    """Check that a column holds numbers, true or false, or lists of these.

    Raises:
        InputError: it holds something else.
    """
    kind = rows.data.schema.field(column).type
    inner = kind.value_type if pa.types.is_list(kind) else kind
    if not any(is_wanted(inner) for is_wanted in (pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating)):
        raise InputError(
            f"{source.name} has values of the type {kind} in {column}, where TRL reads numbers, or true and false.",
            hint="Write them without quotes, or rename the column.",
        )
