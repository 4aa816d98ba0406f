"""Reads the sizes of tokenised rows from Arrow's buffers, without creating Python objects for the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from autotune.core.rows.heaviest import RowSummary
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.workload import IGNORED_LABEL

_BATCH_ROWS = 1000
TIMED_MICRO_BATCHES = 8
"""Number of micro-batches, of all sizes, that are timed in a pass without gradients: evaluation, or a reference."""

Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class RowSizes:
    """Sizes of the rows that a trainer iterates over.

    Attributes:
        lengths: tokens of each sequence that a row passes through the model, after truncation; shape (rows, sequences).
        trainable: tokens per row that the loss counts; shape (rows,).
        generated: tokens that the model generates for each sequence of a typical row; shape (rows, sequences). None
            without generation.
        max_generated: maximum number of tokens that it may generate per sequence.
        second_tokens: tokens of the additional sequence that each row passes through models without gradients, in a
            separate tensor, after truncation; shape (rows,). None without one.
        image_elements: elements of ``pixel_values`` of each row; shape (rows,). None for rows of text.
    """

    lengths: Counts
    trainable: Counts
    generated: Counts | None = None
    max_generated: int = 0
    second_tokens: Counts | None = None
    image_elements: Counts | None = None

    @property
    def tokens(self) -> Counts:
        """Tokens per row, summed over its sequences, including generated ones; shape (rows,)."""
        given = np.asarray(self.lengths.sum(axis=1))
        return given if self.generated is None else given + self.generated.sum(axis=1)

    @property
    def row_summary(self) -> RowSummary:
        """The sizes on which the memory of a micro-batch depends."""
        widest, shortest = self.lengths.max(axis=1), self.lengths.min(axis=1)
        return RowSummary(widest, shortest, self.trainable, self.image_elements, self.second_tokens)


def quantile_indices(sizes: Counts, count: int) -> Counts:
    """Return the indices of ``count`` sizes at evenly spaced quantiles, or of all if there are fewer.

    Example: for 1, 2, 3, …, 100 and a count of 4, the indices of 13, 38, 63 and 88.
    """
    shares = (np.arange(min(count, len(sizes))) + 0.5) / min(count, len(sizes))
    return np.argsort(sizes, kind="stable")[(shares * len(sizes)).astype(np.int64)]


def column_lengths(rows: Any, columns: Sequence[str]) -> Counts:
    """Return the lengths of the lists in columns of a ``datasets.Dataset``; shape (rows, columns)."""
    lengths = np.empty((len(rows), len(columns)), dtype=np.int64)
    for index, batch in enumerate(rows.select_columns(list(columns)).with_format("arrow").iter(batch_size=_BATCH_ROWS)):
        part = lengths[index * _BATCH_ROWS :][:_BATCH_ROWS]
        for number, name in enumerate(columns):
            part[:, number] = np.diff(_offsets(batch.column(name))[0])
    return lengths


def extreme_values(rows: Any, columns: Sequence[str]) -> tuple[int, int]:
    """Return the smallest and the largest value, or 0 if that lies beyond, of lists in a ``datasets.Dataset``."""
    found = [0]
    for batch in rows.select_columns(list(columns)).with_format("arrow").iter(batch_size=_BATCH_ROWS):
        for name in columns:
            found += [value.as_py() or 0 for value in pc.min_max(_offsets(batch.column(name))[1]).values()]
    return min(found), max(found)


def loss_tokens(rows: Any, column: str, length: int | None = None) -> Counts:
    """Return the number of values that the loss counts in each list of a column, cut to a length; shape (rows,)."""
    counts = [np.zeros(0, dtype=np.int64)]
    for offsets, flags in _counted(rows, column):
        counted = np.concatenate([[0], np.cumsum(flags)])
        ends = offsets[1:] if length is None else np.minimum(offsets[1:], offsets[:-1] + length)
        counts.append(counted[ends] - counted[offsets[:-1]])
    return np.concatenate(counts)


def first_loss_token(rows: Any, column: str, *, from_end: bool = False) -> Counts:
    """Return the number of values before the first one of each list in a column that the loss counts; shape (rows,).

    For a list without one, it is the length of the list.

    Args:
        from_end: whether lists are read from their end, so that the values after the last such one are counted.
    """
    found = [np.zeros(0, dtype=np.int64)]
    for offsets, flags in _counted(rows, column):
        if from_end:
            found.append(_before_first(len(flags) - offsets[::-1], flags[::-1])[::-1])
        else:
            found.append(_before_first(offsets, flags))
    return np.concatenate(found)


def _before_first(offsets: Counts, flags: Flags) -> Counts:
    """Return the number of flags that are not set before the first set one of each list, or of all its flags."""
    counted = np.append(np.flatnonzero(flags), offsets[-1])
    first = counted[np.minimum(np.searchsorted(counted, offsets[:-1]), len(counted) - 1)]
    return np.asarray(np.minimum(first, offsets[1:]) - offsets[:-1])


def _counted(rows: Any, column: str) -> Iterator[tuple[Counts, Flags]]:
    """Yield, per batch of rows, the offsets of a column's lists, and a flag per value: whether the loss counts it."""
    for batch in rows.select_columns([column]).with_format("arrow").iter(batch_size=_BATCH_ROWS):
        offsets, values = _offsets(batch.column(column))
        yield offsets, values.to_numpy(zero_copy_only=False) != IGNORED_LABEL


def distribution(values: Sequence[int] | Counts) -> LengthDistribution:
    """Return how often each value occurs."""
    distinct, counts = np.unique(np.array(values, dtype=np.int64), return_counts=True)
    return LengthDistribution(dict(zip(distinct.tolist(), counts.tolist(), strict=True)))


def _offsets(column: pa.ChunkedArray) -> tuple[Counts, Any]:
    """Return the offsets of the lists in a column, and the array of values that the offsets index."""
    lists = column.combine_chunks()
    return np.asarray(lists.offsets, dtype=np.int64), lists.values
