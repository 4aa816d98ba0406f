"""Computes the batch geometry from the lengths of documents that are padded, packed, or laid end to end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle, islice
from math import ceil
from typing import TYPE_CHECKING

from autotune.core.rows.batch_geometry import BatchGeometry, Layout, Shape, Typical, rounded_up
from autotune.core.rows.documents import Documents
from autotune.core.rows.heaviest import RowSummary, heaviest
from autotune.core.rows.representatives import distribution_of_sum, representatives
from autotune.techniques.packing import CUTTING, SEPARATING, packed_documents

if TYPE_CHECKING:
    from autotune.core.rows.table import Numbers

_CACHED = 4096
_GROUPS_PER_LENGTH = 512
"""Number of groups that are kept for each length, enough for micro-batches of all usual sizes."""
_LENGTHS = 256
"""Cache size, in lengths; a search space has a few."""
_WORTH_TRACING = 1.02
"""Least ratio of tokens in the loss for which an otherwise smaller micro-batch is traced too."""


def _heaviest_shapes(
    documents: Documents, rows: int, length: int | None, multiple: int, *, flat: bool
) -> tuple[Layout, list[Shape], Shape | None]:
    """Return the shapes of :func:`autotune.core.rows.heaviest.heaviest`, and the layout of the first of them.

    If that one is not padded, also return the widest of the others that is; else None.

    Args:
        rows: rows of a micro-batch. If there are fewer documents, they are repeated.
        length: tokens to which sequences are cut; None: they are not cut.
        multiple, flat: as for :func:`unpacked`.
    """
    groups = _largest_groups(documents, length, max(_GROUPS_PER_LENGTH, rows))
    width, shortest, tokens, counted = (figures.repeat(groups[0].clip(max=rows)) for figures in groups[1:])

    def shape_of(chosen: Numbers) -> Shape:
        total = int(tokens[chosen].sum())
        trained = 0.0 if documents.trained is None else float(counted[chosen].sum() / max(1, total))
        if flat:
            return Shape(1, rounded_up(total, multiple), trained=trained)
        widest = rounded_up(int(width[chosen].max()), multiple)
        return Shape(rows, widest, filled=share_of(total, rows * documents.sequences * widest), trained=trained)

    found = heaviest(RowSummary(width, shortest, counted), rows, padded=not flat, multiple=multiple)
    shapes = list(map(shape_of, found))
    if flat:
        return Layout.FLAT, shapes, None
    padded = [shape for chosen, shape in zip(found, shapes, strict=True) if shortest[chosen].min() < shape.tokens]
    if shapes[0] in padded:
        return Layout.PADDED, shapes, None
    return Layout.EQUAL, shapes, next(iter(padded), None)


@lru_cache(_LENGTHS)
def _largest_groups(documents: Documents, length: int | None, most: int) -> Sequence[Numbers]:
    """Return the groups of documents that a worst micro-batch of at most ``most`` rows may contain.

    For each group: its count, and of one of its documents the tokens of the longest sequence, of the shortest, of all
    sequences, and in the loss. Cached by length, since there may be millions of documents.
    """
    import numpy as np

    groups = documents.groups.rows()
    # If a length keeps none, which a probe reports, all documents are cut.
    dropping = length is not None and length >= documents.first_kept
    groups = groups[groups[:, 1] <= length] if dropping else groups
    sequences = np.minimum(groups[:, 2:], documents.capped(length))
    width, shortest, tokens = sequences.max(axis=1), sequences.min(axis=1), sequences.sum(axis=1, dtype=np.int64)
    counted = documents.max_loss_tokens(length, dropping=dropping)
    some = min(most, len(groups))
    wide, heavy = width / max(1, width.max()), counted / max(1, counted.max())
    # Widths and counts are integers, so this weight only decides between equal ones.
    tie = 1 / (2 * max(1, tokens.max()))
    largest = [np.argpartition(key, -some)[-some:] for key in (wide + tie * heavy, heavy + tie * wide, wide + heavy)]
    # Whether the widest are padded depends on their shortest sequence, and on the widest narrower document. If they are
    # not, the widest document with a shorter sequence is the widest padded one.
    narrower = np.where(width < width.max(), width, 0)
    padded = np.where(shortest < width, width, 0)
    deciding = [np.lexsort((shortest, -width))[0], narrower.argmax(), padded.argmax()]
    chosen = np.unique(np.concatenate([*largest, deciding]))
    return [figures[chosen] for figures in (groups[:, 0], width, shortest, tokens, counted)]


def _largest_shapes(shapes: Iterable[Shape]) -> list[Shape]:
    """Return the shapes to trace, the largest first; each further one has more tokens in the loss."""

    def counted(shape: Shape) -> float:
        return shape.rows * shape.tokens * shape.filled * (shape.trained or 1.0)

    found: list[Shape] = []
    for shape in sorted(shapes, key=lambda shape: (shape.rows * shape.tokens, counted(shape)), reverse=True):
        if not found or counted(shape) > _WORTH_TRACING * counted(found[-1]):
            found.append(shape)
    return found


@lru_cache(_CACHED)
def unpacked(
    documents: Documents, rows: int, length: int | None, multiple: int, *, flat: bool = False
) -> BatchGeometry:
    """Return the geometry of documents that are padded to the widest sequence of their micro-batch, or laid end to end.

    Args:
        rows: documents of a micro-batch.
        length: tokens to which sequences are cut, or None.
        multiple: the width, or the total of rows laid end to end, is rounded up to a multiple of this.
        flat: whether documents, of one sequence each, are laid end to end.
    """
    kept = _kept_documents(documents, length)
    layout, shapes, masked = _heaviest_shapes(documents, rows, length, multiple, flat=flat)
    most, (worst, *rivals) = max(int(shape.tokens) for shape in shapes), _largest_shapes(shapes)
    return BatchGeometry(
        layout=layout,
        worst=worst,
        rivals=tuple(rivals),
        masked=masked,
        sizes=(
            _flat_sizes(kept, rows, multiple, most)
            if flat
            else _padded_sizes(kept, rows, documents.sequences, multiple, most)
        ),
        tokens=rows * (kept.tokens / kept.rows),
        documents=float(rows),
        rows=kept.rows,
        sequences=documents.sequences,
    )


@lru_cache(_CACHED)
def packed(documents: Documents, rows: int, length: int, multiple: int, strategy: str, *, flat: bool) -> BatchGeometry:
    """Return the geometry of documents of one sequence that are packed into rows of ``length`` tokens.

    Args:
        multiple: the width, or the total of rows laid end to end, is rounded up to a multiple of this.
        strategy: TRL's ``packing_strategy``.
        flat: whether the rows of a micro-batch are laid end to end; else they are padded.
    """
    found = packed_documents(documents, strategy, length)
    in_epoch = found.rows

    def with_trained(shape: Shape) -> Shape:
        """Return a shape with the tokens in the loss of the packed rows that have the most."""
        if documents.trained is None:
            return shape
        counted = sum(islice(cycle(found.loss_tokens), rows))
        return replace(shape, trained=min(1.0, counted / (shape.rows * shape.tokens * shape.filled)))

    held = rows * documents.rows / in_epoch
    kept = documents.tokens_kept(length, dropping=False) if strategy == CUTTING else documents.tokens
    filled = kept / in_epoch
    if flat:
        # All rows of an epoch together have the tokens that are kept.
        most = min(rows * _fullest(documents, min(length, kept), strategy), ceil(rows / in_epoch) * kept)
        worst = with_trained(Shape(1, rounded_up(most, multiple)))
        # Rows are full or nearly so.
        sizes = (Typical(Shape(1, min(worst.tokens, round(rows * filled + (multiple - 1) / 2)))),)
        return BatchGeometry(Layout.FLAT, worst, sizes, rows * filled, held, in_epoch)
    # The last row of each packed batch of documents is not full, and is padded if it shares a micro-batch.
    full = kept // length
    short = in_epoch - full
    left = max(1, round((kept - full * length) / short)) if short else 0
    uneven = Documents.of_groups((count, 1, tokens) for count, tokens in ((full, length), (short, left)) if count)
    geometry = unpacked(uneven, rows, None, multiple)
    return replace(geometry, worst=with_trained(geometry.worst), tokens=rows * filled, documents=held, rows=in_epoch)


def _fullest(documents: Documents, length: int, strategy: str) -> int:
    """Return the largest sum of tokens, at most ``length``, of whole documents, or of their parts if they are split."""
    if strategy not in SEPARATING:
        return length
    widths, *_ = documents.by_width(length if strategy == CUTTING else None, dropping=False)
    parts = {width % length or length for width in widths.tolist()} | (
        {length} if documents.longest >= length else set()
    )
    # Bit N is set if some of them have N tokens together.
    sums, within = 1, (1 << length + 1) - 1
    for shift in sorted(parts):
        while shift <= length and not sums >> length:
            sums |= sums << shift & within
            shift *= 2  # noqa: PLW2901 as many of them as there is room for
    return sums.bit_length() - 1


@dataclass(frozen=True)
class _KeptDocuments:
    """The documents that a maximum length keeps, by width: the tokens of their longest sequence.

    Attributes:
        widths: ascending; shape (widths,).
        counts: number of documents of each width.
        width_tokens: tokens in all sequences of these documents.
        trained: the share of all tokens that the loss counts; 0: that of the whole dataset.
    """

    widths: Numbers
    counts: Numbers
    width_tokens: Numbers
    trained: float

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        return int(self.width_tokens.sum())


@lru_cache(_LENGTHS)
def _kept_documents(documents: Documents, length: int | None) -> _KeptDocuments:
    """Return the kept documents; if a length keeps none, which a probe reports, all documents are cut."""
    import numpy as np

    dropping = length is None or documents.first_kept <= length
    widths, totals, tokens = documents.by_width(length, dropping=dropping)
    trained = 0.0
    if documents.trained is not None and length is not None and length < documents.longest:
        kept = np.concatenate([counts for counts, _ in documents.kept(length, dropping=dropping)])
        trained = float(kept @ documents.max_loss_tokens(length, dropping=dropping) / tokens.sum())
    return _KeptDocuments(widths, totals, tokens, trained)


def widths(
    documents: Documents, length: int | None, multiple: int, together: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the possible widths of micro-batches, and those of micro-batches without padding, ascending.

    Args:
        length: tokens to which sequences are cut, or None.
        together: number of documents that are padded together.
    """
    import numpy as np

    unpadded = np.zeros(documents.longest + 1, dtype=np.int64)
    for counts, sequences in documents.kept(length):
        width = sequences.max(axis=1)
        whole = (sequences.min(axis=1) == width) & (width % multiple == 0)
        np.add.at(unpadded, width[whole], counts[whole])
    every = np.unique(-(-documents.by_width(length)[0] // multiple) * multiple)
    return every.tolist(), np.flatnonzero(unpadded >= together).tolist()


def _padded_sizes(kept: _KeptDocuments, rows: int, sequences: int, multiple: int, widest: int) -> tuple[Typical, ...]:
    """Return sizes that represent micro-batches of random rows, each padded to the widest of its rows.

    Their tokens without padding are means over the micro-batches of the same width, whose other rows are no wider.
    """
    import numpy as np

    below = kept.counts.cumsum() / kept.rows
    shares = np.diff(below**rows, prepend=0.0)
    held = np.diff(rows * below ** (rows - 1) * kept.width_tokens.cumsum() / kept.rows, prepend=0.0)
    drawn = shares > 0
    widths = -(-kept.widths[drawn] // multiple) * multiple

    def shape_of(tokens: int, held: float) -> Shape:
        filled = min(1.0, held / (rows * tokens * sequences))
        return Shape(rows, tokens, filled=filled, trained=kept.trained)

    return representatives(widths, shape_of, shares[drawn], [held[drawn] / shares[drawn]], prescribed=widest)


def _flat_sizes(kept: _KeptDocuments, rows: int, multiple: int, most: int) -> tuple[Typical, ...]:
    """Return sizes that represent micro-batches of random rows laid end to end, of at most ``most`` tokens."""
    import numpy as np

    tokens, shares = distribution_of_sum(np.bincount(kept.widths, kept.counts), rows)
    widths = -(-tokens // multiple) * multiple
    return representatives(
        widths, lambda tokens: Shape(1, tokens, trained=kept.trained), shares, most_tokens=most, prescribed=most
    )


def widest_of(counts: Mapping[int, int], rows: int) -> list[tuple[int, float]]:
    """Return the probability of each width to be the largest among ``rows`` random rows."""
    import numpy as np

    widths = sorted(counts)
    upto = np.cumsum([counts[width] for width in widths])
    return list(zip(widths, np.diff((upto / upto[-1]) ** rows, prepend=0.0).tolist(), strict=True))


def share_of(unpadded: int, tokens: int) -> float:
    """Return the share of a micro-batch's tokens that are not padding, rounded up to a thousandth, at most 1."""
    return min(1.0, ceil(1000 * unpadded / tokens) / 1000)
