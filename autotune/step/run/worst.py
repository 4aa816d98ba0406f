"""Selects the rows of the micro-batches that may need the most memory, and of those that trigger a recompilation."""

from __future__ import annotations

import numpy as np

from autotune.core.rows.blocks import block_rows
from autotune.core.rows.heaviest import heaviest, heaviest_blocks, heaviest_unpadded
from autotune.step.rows import Counts, RowSizes
from autotune.step.trainers.base import Collation


def worst_order(sizes: RowSizes, rows: int, collation: Collation) -> tuple[Counts, ...]:
    """Return the row indices of the micro-batches that may need the most memory, the widest first.

    Each has its rows with the most image data last.

    See :mod:`autotune.core.rows.heaviest`.
    """
    summary = sizes.row_summary
    if collation.blocks:
        return heaviest_blocks(summary, rows, collation.multiple)
    found = heaviest(summary, rows, padded=not collation.flat, multiple=collation.multiple)
    if summary.image_elements is None:
        return found
    # Rows drawn for several micro-batches are split in this order.
    return tuple(chosen[np.argsort(summary.image_elements[chosen], kind="stable")] for chosen in found)


def next_narrower(sizes: RowSizes, rows: int, collation: Collation) -> tuple[Counts, ...]:
    """Return the rows of the widest micro-batch that is narrower than the worst; empty if there is none."""
    widths = sizes.row_summary.rounded(collation.multiple)
    blocks = block_rows(len(widths), rows) if collation.blocks else None
    widths = widths if blocks is None else widths[blocks].max(axis=1)
    narrower = np.flatnonzero(widths < widths.max())
    if not len(narrower):
        return ()
    if blocks is not None:
        return (blocks[narrower[widths[narrower].argmax()]],)
    # The first result is padded if any of these rows can be, as in the worst micro-batch.
    narrower_sizes = RowSizes(sizes.lengths[narrower], sizes.trainable[narrower])
    return (narrower[worst_order(narrower_sizes, rows, collation)[0]],)


def unpadded(sizes: RowSizes, rows: int, collation: Collation) -> tuple[Counts, ...]:
    """Return the rows of the widest micro-batch without padding; empty if there is none, or none is ever padded."""
    if collation.flat:
        return ()
    found = heaviest_unpadded(sizes.row_summary, rows, collation.multiple, blocks=collation.blocks)
    return () if found is None else (found,)
