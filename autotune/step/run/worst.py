"""Finds the rows of micro-batches that may need the most memory, and of those that cause a recompilation."""

from __future__ import annotations

import numpy as np

from autotune.core.blocks import block_rows
from autotune.core.heaviest import heaviest, heaviest_blocks
from autotune.step.rows import Counts, Flags, RowSizes
from autotune.step.trainers.base import Collation


def worst_order(sizes: RowSizes, rows: int, collation: Collation) -> tuple[Counts, ...]:
    """Return the row indices of the micro-batches that may need the most memory, the widest first.

    Of any rows with images, those with the most image data come last in each of them.

    See :mod:`autotune.core.heaviest`.
    """
    loads = sizes.loads
    if collation.blocks:
        return heaviest_blocks(loads, rows, collation.multiple)
    found = heaviest(loads, rows, padded=not collation.flat, multiple=collation.multiple)
    if loads.image_elements is None:
        return found
    # Rows that are drawn for several micro-batches are divided in this order.
    return tuple(chosen[np.argsort(loads.image_elements[chosen], kind="stable")] for chosen in found)


def narrower(sizes: RowSizes, rows: int, collation: Collation) -> tuple[Counts, ...]:
    """Return the rows of the widest micro-batch that is narrower than the worst; empty if there is none."""
    if collation.blocks:
        every = block_rows(len(sizes.widest), rows)
        widths = collation.rounded(sizes.widest[every].max(axis=1))
        return _widest(every, widths, widths < widths.max())
    widths = collation.rounded(sizes.widest)
    below = np.flatnonzero(widths < widths.max())
    if not len(below):
        return ()
    # The first one is padded, as the worst is, if any is.
    some = RowSizes(sizes.lengths[below], sizes.trainable[below])
    return (below[worst_order(some, rows, collation)[0]],)


def unpadded(sizes: RowSizes, rows: int, collation: Collation) -> tuple[Counts, ...]:
    """Return the rows of the widest micro-batch without padding, if others have some; empty if there is none."""
    if collation.blocks:
        every = block_rows(len(sizes.widest), rows)
        widths = collation.rounded(sizes.widest[every].max(axis=1))
        whole = (sizes.lengths[every] == widths[:, None, None]).all(axis=(1, 2))
        return _widest(every, widths, whole & ~whole[widths.argmax()])
    widths = collation.rounded(sizes.widest)
    whole = np.flatnonzero((sizes.lengths == widths[:, None]).all(axis=1))
    enough = [
        width for width, count in zip(*np.unique(widths[whole], return_counts=True), strict=True) if count >= rows
    ]
    return (whole[widths[whole] == max(enough)][:rows],) if enough and not collation.flat else ()


def _widest(blocks: Counts, widths: Counts, of: Flags) -> tuple[Counts, ...]:
    """Return the rows of the widest of some blocks; none where there are none."""
    kind = np.flatnonzero(of)
    return (blocks[kind[widths[kind].argmax()]],) if len(kind) else ()
