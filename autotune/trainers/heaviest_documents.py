"""Which documents make the micro-batches that may need the most memory, where they are known by their groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from autotune.core.batch_geometry import Shape
from autotune.core.documents import Documents

if TYPE_CHECKING:
    from autotune.core.table import Numbers

_GROUPS = 512
"""Groups of documents that are kept for each length: micro-batches of all usual sizes are chosen from the same ones."""
LENGTHS = 256
"""Lengths for which documents are looked through and remembered; a search space has a few."""
_MORE = 1.02
"""Times as many counted tokens for which a micro-batch that is smaller otherwise is traced as well."""


@dataclass(frozen=True)
class Chosen:
    """The rows of a micro-batch.

    Attributes:
        widest: tokens of the longest sequence.
        tokens: in all sequences.
        trained_share: the share of these that the loss counts; 0 if it is not known.
    """

    widest: int
    tokens: int
    trained_share: float


def heaviest_documents(documents: Documents, rows: int, length: int | None) -> list[Chosen]:
    """Return the micro-batches that may need the most memory, as :func:`autotune.core.heaviest.heaviest` does of rows.

    One has the widest documents, one those with the most tokens that the loss counts, one those with the largest sum of
    both, and one the widest document and otherwise those with the most counted tokens. A document that is cut keeps the
    share that is counted.

    Args:
        rows: of a micro-batch. If there are fewer documents, they are repeated.
        length: tokens to which sequences are cut; None: they are not cut.
    """
    import numpy as np

    counts, width, tokens, counted = _largest_groups(documents, length, max(_GROUPS, rows))

    def most(figures: Numbers) -> Numbers:
        """Return the documents with the largest figures, as the groups they are of."""
        largest = np.argsort(-figures, kind="stable")[:rows]
        return np.resize(largest.repeat(counts[largest].clip(max=rows)), rows)

    by_width, by_count, by_both = _sort_keys(width, tokens, counted)
    widest, heaviest = most(by_width), most(by_count)
    others = np.delete(heaviest, np.append(np.flatnonzero(heaviest == widest[0]), rows - 1)[0])
    return [
        Chosen(
            int(width[some].max()),
            int(tokens[some].sum()),
            0.0 if documents.trained is None else float(counted[some].sum() / tokens[some].sum().clip(min=1)),
        )
        for some in (widest, np.append(widest[:1], others), most(by_both), heaviest)
    ]


@lru_cache(LENGTHS)
def _largest_groups(documents: Documents, length: int | None, most: int) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Return the groups of documents of which micro-batches of ``most`` rows or fewer may need the most memory.

    Millions are looked through once for a length. Of each group it is the count, and, of one of its documents, the
    tokens of the longest sequence, of all sequences, and those that the loss counts.
    """
    import numpy as np

    groups = documents.groups.rows()
    # Where none is kept, which a probe reports, all are cut.
    kept = slice(None) if length is None or length < documents.first_kept else groups[:, 1] <= length
    groups = groups[kept]
    sequences = np.minimum(groups[:, 2:], length or documents.longest)
    width, tokens = sequences.max(axis=1), sequences.sum(axis=1, dtype=np.int64)
    counted = tokens.astype(float)
    if documents.trained is not None:
        counted *= documents.trained.rows()[kept, 0] / groups[:, 2:].sum(axis=1).clip(min=1)
    some = min(most, len(groups))
    largest = [np.argpartition(figures, -some)[-some:] for figures in _sort_keys(width, tokens, counted)]
    chosen = np.unique(np.concatenate(largest))
    return groups[chosen, 0], width[chosen], tokens[chosen], counted[chosen]


def _sort_keys(width: Numbers, tokens: Numbers, counted: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return by what documents are ordered: their width, their counted tokens, and both."""
    wide, heavy = width / max(1, width.max()), counted / max(1, counted.max())
    # Widths and counts are whole numbers, so that so small a share decides only between equal ones.
    tie = 1 / (2 * max(1, tokens.max()))
    return wide + tie * heavy, heavy + tie * wide, wide + heavy


def largest_shapes(shapes: Iterable[Shape]) -> list[Shape]:
    """Return the shapes that are worth a trace, the largest first; each smaller one has more counted tokens."""

    def counted(shape: Shape) -> float:
        return shape.rows * shape.tokens * shape.filled * (shape.trained or 1.0)

    found: list[Shape] = []
    for shape in sorted(shapes, key=lambda shape: (shape.rows * shape.tokens, counted(shape)), reverse=True):
        if not found or counted(shape) > _MORE * counted(found[-1]):
            found.append(shape)
    return found
