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
        flags: whether the lists may also hold true or false, or numbers that are not whole.

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
    if not pa.types.is_fixed_size_list(kind):
        return rows
    return rows.cast_column(column, List(rows.features[column].feature))


def check_flags(source: DatasetSource, rows: Dataset, column: str) -> None:
    """Check that a column holds true or false.

    Raises:
        InputError: a row has something else.
    """
    for row, value in enumerate(rows[column], start=1):
        # 0 and 1 are common and equal False and True; -1 is ambiguous.
        if value not in (True, False):
            raise InputError(
                f"Row {row} of {source.name} has the {column} {value!r}.", hint="It has to be true or false."
            )
