"""Which documents make the micro-batches that may need the most memory, where they are known by their groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from autotune.core.batch_geometry import Shape
from autotune.core.documents import Documents
from autotune.core.heaviest import Loads, heaviest

if TYPE_CHECKING:
    from autotune.core.table import Numbers

_GROUPS = 512
"""Groups of documents that are kept for each length: micro-batches of all usual sizes are chosen from the same ones."""
LENGTHS = 256
"""Most lengths whose heaviest documents are cached; a search space has a few."""
_MORE = 1.02
"""Factor of counted tokens from which an otherwise smaller micro-batch is also traced."""


@dataclass(frozen=True)
class Chosen:
    """The rows of a micro-batch.

    Attributes:
        widest, shortest: tokens of the longest and shortest sequence.
        tokens: in all sequences.
        trained_share: the share of these that the loss counts; 0 if it is not known.
    """

    widest: int
    shortest: int
    tokens: int
    trained_share: float


def heaviest_documents(
    documents: Documents, rows: int, length: int | None, *, padded: bool, multiple: int = 1
) -> list[Chosen]:
    """Return the micro-batches that may need the most memory, as :func:`autotune.core.heaviest.heaviest` does of rows.

    Args:
        rows: of a micro-batch. If there are fewer documents, they are repeated.
        length: tokens to which sequences are cut; None: they are not cut.
        padded, multiple: as in :func:`autotune.core.batch_geometry.worst_micro_batches`.
    """
    groups = _largest_groups(documents, length, max(_GROUPS, rows))
    each = [figures.repeat(groups[0].clip(max=rows)) for figures in groups[1:]]
    width, shortest, tokens, counted = each
    loads = Loads(width, shortest, counted)
    return [
        Chosen(
            int(width[some].max()),
            int(shortest[some].min()),
            int(tokens[some].sum()),
            0.0 if documents.trained is None else float(counted[some].sum() / tokens[some].sum().clip(min=1)),
        )
        for some in heaviest(loads, rows, padded=padded, multiple=multiple, several=documents.sequences > 1)
    ]


@lru_cache(LENGTHS)
def _largest_groups(documents: Documents, length: int | None, most: int) -> Sequence[Numbers]:
    """Return the groups of documents of which micro-batches of ``most`` rows or fewer may need the most memory.

    Millions are looked through once for a length. Of each group it is the count, and, of one of its documents, the
    tokens of the longest sequence, of the shortest, of all sequences, and those that the loss counts.
    """
    import numpy as np

    groups = documents.groups.rows()
    # Where none is kept, which a probe reports, all are cut.
    dropping = length is not None and length >= documents.first_kept
    groups = groups[groups[:, 1] <= length] if dropping else groups
    sequences = np.minimum(groups[:, 2:], length or documents.longest)
    width, shortest, tokens = sequences.max(axis=1), sequences.min(axis=1), sequences.sum(axis=1, dtype=np.int64)
    counted = documents.counted(length, dropping=dropping)
    some = min(most, len(groups))
    wide, heavy = width / max(1, width.max()), counted / max(1, counted.max())
    # Widths and counts are whole numbers, so that so small a share decides only between equal ones.
    tie = 1 / (2 * max(1, tokens.max()))
    largest = [np.argpartition(key, -some)[-some:] for key in (wide + tie * heavy, heavy + tie * wide, wide + heavy)]
    # Whether the widest are padded depends on the shortest of their sequences, and on the widest that is narrower.
    narrower = np.where(width < width.max(), width, 0)
    deciding = [np.lexsort((shortest, -width))[0], narrower.argmax()]
    chosen = np.unique(np.concatenate([*largest, deciding]))
    return [figures[chosen] for figures in (groups[:, 0], width, shortest, tokens, counted)]


def largest_shapes(shapes: Iterable[Shape]) -> list[Shape]:
    """Return the shapes that are worth a trace, the largest first; each smaller one has more counted tokens."""

    def counted(shape: Shape) -> float:
        return shape.rows * shape.tokens * shape.filled * (shape.trained or 1.0)

    found: list[Shape] = []
    for shape in sorted(shapes, key=lambda shape: (shape.rows * shape.tokens, counted(shape)), reverse=True):
        if not found or counted(shape) > _MORE * counted(found[-1]):
            found.append(shape)
    return found
