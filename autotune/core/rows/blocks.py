"""Micro-batches that are blocks of successive rows, and the choice of those that may need the most memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from autotune.core.rows.table import Numbers

    Blocks = np.recarray[Any, np.dtype[np.record]]

# Blocks that are compared at a time; an epoch may have millions.
_COMPARED_AT_ONCE = 1 << 16


RECORD = [
    ("rows", "i8"), ("tokens", "i8"), ("padded", "?"), ("second_tokens", "i8"), ("second_padded", "?"),
    ("image_elements", "i8"),
]  # fmt: skip
"""The fields of ``Blocks``, an array of all micro-batches of an epoch, with their types.

- ``rows``: rows of the dataset; the last block of an epoch may have fewer than the others.
- ``tokens``: tokens of its widest sequence, padding included.
- ``padded``: whether a sequence is padded, which brings an attention mask.
- ``second_tokens``, ``second_padded``: the same for a second tensor, which passes through models without
  gradients; 0: none.
- ``image_elements``: numbers that the vision tower gets; 0 for rows of text.
"""


def block_rows(population: int, rows: int) -> Numbers:
    """Return the indices of each block's rows; shape (blocks, rows). An incomplete last block repeats its rows."""
    import numpy as np

    first = np.arange(0, population, rows)[:, None]
    return np.asarray(first + np.arange(rows) % np.minimum(rows, population - first))


def blocks_of(lengths: Any, second_tokens: Any, rows: int, multiple: int = 1, image_elements: Any = None) -> Blocks:
    """Return the blocks of ``rows`` successive rows, in order; the last one may have fewer.

    Args:
        lengths: tokens of each row's sequence after cutting; an array or a sequence, not empty.
        second_tokens: tokens of each row's sequence in the second tensor after cutting, or None without one.
        multiple: the length of a tensor is rounded up to a multiple of this.
        image_elements: numbers that the vision tower gets of each row, or None for rows of text.
    """
    import numpy as np

    starts = np.arange(0, len(lengths), rows)
    counts = np.diff(starts, append=len(lengths))

    def tensor(tokens: Any) -> tuple[Numbers, Numbers]:
        width = -(-np.maximum.reduceat(tokens, starts) // multiple) * multiple
        return width, np.minimum.reduceat(tokens, starts) < width

    zeros = np.zeros_like(counts)
    tokens, padded = tensor(lengths)
    second, second_padded = (zeros, zeros > 0) if second_tokens is None else tensor(second_tokens)
    elements = zeros if image_elements is None else np.add.reduceat(image_elements, starts)
    columns = [counts, tokens, padded, second, second_padded, elements]
    return np.rec.fromarrays(columns, dtype=RECORD)


def worst_blocks(blocks: Blocks) -> list[int]:
    """Return the indices of the blocks that may need the most memory, the widest first.

    They are the Pareto front in widths, masks and image data; tokens in the loss are left to
    :func:`autotune.core.rows.heaviest.heaviest_blocks`. Which of them needs the most depends on the model: a block with
    a wider second tensor but a narrower first tensor may need less, and a block that is narrower in both may need more
    in the vision tower if it has more image data.

    Example: of blocks with widths (9, 4), (8, 7) and (7, 6), the first two are returned: the third is narrower than the
    second in both tensors.
    """
    import numpy as np

    front: Numbers = np.zeros(0, dtype=np.int64)
    for start in range(0, len(blocks), _COMPARED_AT_ONCE):
        front = _front(blocks, np.append(front, np.arange(start, min(start + _COMPARED_AT_ONCE, len(blocks)))))
    keys = [blocks[name][front] for name in ("second_tokens", "padded", "tokens")]
    return [int(place) for place in front[np.lexsort(keys)][::-1]]


def _front(blocks: Blocks, places: Numbers) -> Numbers:
    """Return the blocks on the Pareto front of needs; of equal blocks, the first."""
    import numpy as np

    front, needs = [], _needs(blocks[places])
    # Sorted so that a block comes before all blocks that it dominates.
    left = np.lexsort([places, *(-needs.T[::-1])])
    while len(left):
        front.append(places[left[0]])
        left = left[(needs[left] > needs[left[0]]).any(axis=1)]
    return np.array(front)


def _needs(blocks: Numbers) -> Numbers:
    """Return the quantities with which the memory of blocks grows; shape (blocks, quantities).

    They are the tokens and the squared length of each tensor, the masks, and the image data.
    """
    import numpy as np

    rows = blocks["rows"].astype(np.int64)
    sizes = [rows * blocks[name].astype(np.int64) ** power for name in ("tokens", "second_tokens") for power in (1, 2)]
    others = [blocks[name] for name in ("padded", "second_padded", "image_elements")]
    return np.stack([*sizes, *others], axis=1)
