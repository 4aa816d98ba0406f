"""Sizes of tokenised rows, read from Arrow's buffers without making Python objects of the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from autotune.core.workload import IGNORED_LABEL

_BATCH_ROWS = 1000

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowSizes:
    """Sizes of each row of a dataset.

    Attributes:
        tokens: tokens per row.
        trainable: tokens per row that the loss counts.
        documents: documents per row as the ``seq_lengths`` of packing count them, or None where there are none.
    """

    tokens: Counts
    trainable: Counts
    documents: Counts | None


def row_sizes(rows: Any) -> RowSizes:
    """Return the sizes of the rows of a ``datasets.Dataset`` with ``input_ids`` and ``labels``."""
    tokens, trainable, documents = [], [], []
    packed = "seq_lengths" in rows.column_names
    for batch in rows.with_format("arrow").iter(batch_size=_BATCH_ROWS):
        tokens.append(_list_lengths(batch.column("input_ids")))
        trainable.append(_trainable(batch.column("labels")))
        if packed:
            documents.append(_list_lengths(batch.column("seq_lengths")))
    return RowSizes(_joined(tokens), _joined(trainable), _joined(documents) if packed else None)


def _joined(parts: list[Counts]) -> Counts:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def _offsets(column: pa.ChunkedArray) -> tuple[Counts, Any]:
    """Return where each list of a column starts and ends, and the values that the offsets count into."""
    lists = column.combine_chunks()
    if isinstance(lists, pa.ChunkedArray):
        lists = pa.concat_arrays(lists.chunks)
    return np.asarray(lists.offsets, dtype=np.int64), lists.values


def _list_lengths(column: pa.ChunkedArray) -> Counts:
    offsets, _ = _offsets(column)
    return np.diff(offsets)


def _trainable(column: pa.ChunkedArray) -> Counts:
    offsets, values = _offsets(column)
    counted = np.concatenate([[0], np.cumsum(values.to_numpy(zero_copy_only=False) != IGNORED_LABEL)])
    return np.asarray(counted[offsets[1:]] - counted[offsets[:-1]], dtype=np.int64)
