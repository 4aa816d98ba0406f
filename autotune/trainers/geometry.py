"""Computes micro-batches from the lengths of documents: padded, packed, or concatenated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle, islice
from math import ceil
from typing import TYPE_CHECKING

from autotune.core.batch_geometry import BatchGeometry, Layout, Shape, Typical, rounded_up
from autotune.core.documents import Documents
from autotune.core.heaviest import Loads, heaviest
from autotune.core.representatives import representatives, summed
from autotune.techniques.packing import CUTTING, SEPARATING, packed_documents

if TYPE_CHECKING:
    from autotune.core.table import Numbers

_REMEMBERED = 4096
_GROUPS = 512
"""Groups of documents that are kept for each length, enough to choose micro-batches of all usual sizes."""
_LENGTHS = 256
"""Most lengths whose heaviest documents are cached; a search space has a few."""
_MORE = 1.02
"""Least ratio of counted tokens for which an otherwise smaller micro-batch is traced too."""


def _heaviest_shapes(
    documents: Documents, rows: int, length: int | None, multiple: int, *, flat: bool
) -> tuple[Layout, list[Shape]]:
    """Return the micro-batches that may need the most memory, as :func:`autotune.core.heaviest.heaviest` does of rows.

    The layout is that of the first of them.

    Args:
        rows: of a micro-batch. If there are fewer documents, they are repeated.
        length: tokens to which sequences are cut; None: they are not cut.
        multiple, flat: as for :func:`unpacked`.
    """
    groups = _largest_groups(documents, length, max(_GROUPS, rows))
    width, shortest, tokens, counted = (figures.repeat(groups[0].clip(max=rows)) for figures in groups[1:])

    def shape_of(chosen: Numbers) -> Shape:
        held = int(tokens[chosen].sum())
        trained = 0.0 if documents.trained is None else float(counted[chosen].sum() / max(1, held))
        if flat:
            return Shape(1, rounded_up(held, multiple), trained=trained)
        widest = rounded_up(int(width[chosen].max()), multiple)
        return Shape(rows, widest, filled=share_of(held, rows * documents.sequences * widest), trained=trained)

    found = heaviest(Loads(width, shortest, counted), rows, padded=not flat, multiple=multiple)
    shapes = list(map(shape_of, found))
    padding = shortest[found[0]].min() < shapes[0].tokens
    return Layout.FLAT if flat else Layout.PADDED if padding else Layout.EQUAL, shapes


@lru_cache(_LENGTHS)
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


def _largest_shapes(shapes: Iterable[Shape]) -> list[Shape]:
    """Return the shapes that are worth a trace, the largest first; each smaller one has more counted tokens."""

    def counted(shape: Shape) -> float:
        return shape.rows * shape.tokens * shape.filled * (shape.trained or 1.0)

    found: list[Shape] = []
    for shape in sorted(shapes, key=lambda shape: (shape.rows * shape.tokens, counted(shape)), reverse=True):
        if not found or counted(shape) > _MORE * counted(found[-1]):
            found.append(shape)
    return found


@lru_cache(_REMEMBERED)
def unpacked(
    documents: Documents, rows: int, length: int | None, multiple: int, *, flat: bool = False
) -> BatchGeometry:
    """Return the geometry of documents that are padded to the widest sequence of their micro-batch, or not padded.

    Args:
        rows: documents of a micro-batch.
        length: to which sequences are cut, or None.
        multiple: to which the widest is rounded up, or all of them together.
        flat: whether documents, of one sequence each, are laid end to end.
    """
    kept = _kept(documents, length)
    layout, shapes = _heaviest_shapes(documents, rows, length, multiple, flat=flat)
    most, (worst, *rivals) = max(int(shape.tokens) for shape in shapes), _largest_shapes(shapes)
    return BatchGeometry(
        layout=layout,
        worst=worst,
        rivals=tuple(rivals),
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


@lru_cache(_REMEMBERED)
def packed(documents: Documents, rows: int, length: int, multiple: int, strategy: str, *, flat: bool) -> BatchGeometry:
    """Return the geometry of documents of one sequence that are packed into rows of a length.

    Args:
        multiple: to which the rows of a micro-batch are rounded up, as a whole where they lie end to end.
        strategy: in the words of TRL's ``packing_strategy``.
        flat: whether the rows of a micro-batch lie end to end; else they are padded.
    """
    found = packed_documents(documents, strategy, length)
    in_epoch = found.rows

    def with_counted(shape: Shape) -> Shape:
        """Return a shape with the counted tokens of the packed rows that have the most."""
        if documents.trained is None:
            return shape
        counted = sum(islice(cycle(found.counted), rows))
        return replace(shape, trained=min(1.0, counted / (shape.rows * shape.tokens * shape.filled)))

    held = rows * documents.rows / in_epoch
    kept = documents.tokens_kept(length, dropping=False) if strategy == CUTTING else documents.tokens
    filled = kept / in_epoch
    if flat:
        worst = with_counted(Shape(1, rounded_up(rows * _fullest(documents, min(length, kept), strategy), multiple)))
        # Rows are full or nearly so.
        sizes = (Typical(Shape(1, min(worst.tokens, round(rows * filled + (multiple - 1) / 2)))),)
        return BatchGeometry(Layout.FLAT, worst, sizes, rows * filled, held, in_epoch)
    # The last row of each packed batch of documents is not full, and is padded if it shares a micro-batch.
    full = kept // length
    short = in_epoch - full
    left = max(1, round((kept - full * length) / short)) if short else 0
    uneven = Documents.of_groups((count, 1, tokens) for count, tokens in ((full, length), (short, left)) if count)
    geometry = unpacked(uneven, rows, None, multiple)
    return replace(geometry, worst=with_counted(geometry.worst), tokens=rows * filled, documents=held, rows=in_epoch)


def _fullest(documents: Documents, length: int, strategy: str) -> int:
    """Return the most tokens up to a length that whole documents, or their parts where they are split, add up to."""
    if strategy not in SEPARATING:
        return length
    widths = documents.by_width(length if strategy == CUTTING else None, dropping=False)
    parts = {width % length or length for width in widths} | ({length} if documents.longest >= length else set())
    # Bit N is set where some of them have N tokens together.
    sums, within = 1, (1 << length + 1) - 1
    for shift in sorted(parts):
        while shift <= length and not sums >> length:
            sums |= sums << shift & within
            shift *= 2  # noqa: PLW2901 as many of them as there is room for
    return sums.bit_length() - 1


@dataclass(frozen=True)
class _Kept:
    """The documents that are left at a maximum length, by the tokens of their longest sequence.

    Attributes:
        widths: these, ascending; shape (widths,).
        counts: their number, by width.
        held: the tokens in all of their sequences, by width.
        trained: the share of all tokens that the loss counts; 0: that of the whole dataset.
    """

    widths: Numbers
    counts: Numbers
    held: Numbers
    trained: float

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        return int(self.held.sum())


@lru_cache(_LENGTHS)
def _kept(documents: Documents, length: int | None) -> _Kept:
    """Return the kept documents; if there are none, which a probe reports, all documents cut."""
    import numpy as np

    dropping = length is None or documents.first_kept <= length
    (found, held), kept = np.zeros((2, documents.longest + 1), dtype=np.int64), []
    for counts, sequences in documents.kept(length, dropping=dropping):
        width = sequences.max(axis=1)
        kept.append(counts)
        np.add.at(found, width, counts)
        np.add.at(held, width, counts * sequences.sum(axis=1))
    trained = 0.0
    if documents.trained is not None and length is not None and length < documents.longest:
        trained = float(np.concatenate(kept) @ documents.counted(length, dropping=dropping) / held.sum())
    widths = np.flatnonzero(found)
    return _Kept(widths, found[widths], held[widths], trained)


def widths(
    documents: Documents, length: int | None, multiple: int, together: int
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the widths that micro-batches of any documents can have, and those without padding, ascending.

    Args:
        length: tokens to which sequences are cut, or None.
        together: documents that are padded together.
    """
    counts: dict[int, int] = {}
    for some, sequences in documents.kept(length):
        width = sequences.max(axis=1)
        whole = (sequences.min(axis=1) == width) & (width % multiple == 0)
        for tokens, count in zip(width[whole].tolist(), some[whole].tolist(), strict=True):
            counts[tokens] = counts.get(tokens, 0) + count
    every = sorted({rounded_up(width, multiple) for width in documents.by_width(length)})
    return every, sorted(tokens for tokens, count in counts.items() if count >= together)


def _padded_sizes(kept: _Kept, rows: int, sequences: int, multiple: int, widest: int) -> tuple[Typical, ...]:
    """Return sizes that stand for micro-batches of random rows, each padded to the widest of its rows.

    Their tokens without padding are means as well: of rows of which the widest is so wide, the others are drawn from
    those that are no wider.
    """
    import numpy as np

    below = kept.counts.cumsum() / kept.rows
    shares = np.diff(below**rows, prepend=0.0)
    held = np.diff(rows * below ** (rows - 1) * kept.held.cumsum() / kept.rows, prepend=0.0)
    drawn = shares > 0
    widths = -(-kept.widths[drawn] // multiple) * multiple

    def shape_of(tokens: int, held: float) -> Shape:
        filled = min(1.0, held / (rows * tokens * sequences))
        return Shape(rows, tokens, filled=filled, trained=kept.trained)

    return representatives(widths, shape_of, shares[drawn], [held[drawn] / shares[drawn]], known=widest)


def _flat_sizes(kept: _Kept, rows: int, multiple: int, most: int) -> tuple[Typical, ...]:
    """Return sizes that stand for micro-batches of random rows that lie end to end, of ``most`` tokens at most."""
    import numpy as np

    tokens, shares = summed(np.bincount(kept.widths, kept.counts), rows)
    widths = -(-tokens // multiple) * multiple
    return representatives(
        widths, lambda tokens: Shape(1, tokens, trained=kept.trained), shares, most_tokens=most, known=most
    )


def widest_of(counts: Mapping[int, int], rows: int) -> list[tuple[int, float]]:
    """Return the probability of each width to be the largest of ``rows`` random rows."""
    import numpy as np

    widths = sorted(counts)
    upto = np.cumsum([counts[width] for width in widths])
    return list(zip(widths, np.diff((upto / upto[-1]) ** rows, prepend=0.0).tolist(), strict=True))


def share_of(held: int, tokens: int) -> float:
    """Return the share of a micro-batch's tokens that is no padding, rounded up to a thousandth, and 1 at most."""
    return min(1.0, ceil(1000 * held / tokens) / 1000)
