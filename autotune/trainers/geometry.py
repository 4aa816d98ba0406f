"""Computes micro-batches from the lengths of documents: padded, packed, or laid end to end, as the trainer chooses."""

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
"""Groups of documents that are kept for each length: micro-batches of all usual sizes are chosen from the same ones."""
_LENGTHS = 256
"""Most lengths whose heaviest documents are cached; a search space has a few."""
_MORE = 1.02
"""Factor of counted tokens from which an otherwise smaller micro-batch is also traced."""


@dataclass(frozen=True)
class _Chosen:
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


def _heaviest_documents(
    documents: Documents, rows: int, length: int | None, *, padded: bool, multiple: int = 1
) -> list[_Chosen]:
    """Return the micro-batches that may need the most memory, as :func:`autotune.core.heaviest.heaviest` does of rows.

    Args:
        rows: of a micro-batch. If there are fewer documents, they are repeated.
        length: tokens to which sequences are cut; None: they are not cut.
        padded, multiple: as in :func:`autotune.core.heaviest.heaviest`.
    """
    groups = _largest_groups(documents, length, max(_GROUPS, rows))
    each = [figures.repeat(groups[0].clip(max=rows)) for figures in groups[1:]]
    width, shortest, tokens, counted = each
    loads = Loads(width, shortest, counted)
    return [
        _Chosen(
            int(width[some].max()),
            int(shortest[some].min()),
            int(tokens[some].sum()),
            0.0 if documents.trained is None else float(counted[some].sum() / tokens[some].sum().clip(min=1)),
        )
        for some in heaviest(loads, rows, padded=padded, multiple=multiple)
    ]


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
def padded(documents: Documents, rows: int, length: int | None, multiple: int) -> BatchGeometry:
    """Return the geometry of documents that are padded to the widest sequence of their micro-batch.

    Args:
        rows: documents of a micro-batch.
        length: to which sequences are cut, or None.
        multiple: to which the widest is rounded up.
    """
    kept = _kept(documents, length)
    heaviest = _heaviest_documents(documents, rows, length, padded=True, multiple=multiple)
    width = rounded_up(heaviest[0].widest, multiple)

    def shape_of(chosen: _Chosen) -> Shape:
        wide = rounded_up(chosen.widest, multiple)
        filled = share_of(chosen.tokens, rows * documents.sequences * wide)
        return Shape(rows, wide, filled=filled, trained=chosen.trained_share)

    largest, *rivals = _largest_shapes(map(shape_of, heaviest))
    return BatchGeometry(
        layout=Layout.PADDED if heaviest[0].shortest < width else Layout.EQUAL,
        worst=largest,
        rivals=tuple(rivals),
        sizes=_padded_sizes(kept, rows, documents.sequences, multiple, width),
        tokens=rows * (kept.tokens / kept.rows),
        documents=float(rows),
        rows=kept.rows,
        sequences=documents.sequences,
    )


@lru_cache(_REMEMBERED)
def end_to_end(documents: Documents, rows: int, length: int | None, multiple: int) -> BatchGeometry:
    """Return the geometry of documents of one sequence that are laid end to end, padded only as a whole.

    Args:
        multiple: to which all of them together are rounded up.
    """
    kept = _kept(documents, length)
    heaviest = _heaviest_documents(documents, rows, length, padded=False)
    shapes = (Shape(1, rounded_up(chosen.tokens, multiple), trained=chosen.trained_share) for chosen in heaviest)
    worst, *rivals = _largest_shapes(shapes)
    return BatchGeometry(
        layout=Layout.FLAT,
        worst=worst,
        rivals=tuple(rivals),
        sizes=_flat_sizes(kept, rows, multiple, max(chosen.tokens for chosen in heaviest)),
        tokens=rows * (kept.tokens / kept.rows),
        documents=float(rows),
        rows=kept.rows,
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
    geometry = padded(uneven, rows, None, multiple)
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
    """The documents that are left at a maximum length.

    Attributes:
        by_width: their number by the tokens of their longest sequence.
        tokens_of: the tokens in all sequences of the documents of that width.
        trained: the share of all tokens that the loss counts; 0: that of the whole dataset.
    """

    by_width: Mapping[int, int]
    tokens_of: Mapping[int, int]
    trained: float

    @property
    def rows(self) -> int:
        return sum(self.by_width.values())

    @property
    def tokens(self) -> int:
        return sum(self.tokens_of.values())


@lru_cache(_LENGTHS)
def _kept(documents: Documents, length: int | None) -> _Kept:
    """Return the kept documents; if there are none, which a probe reports, all documents cut."""
    import numpy as np

    dropping = length is None or documents.first_kept <= length
    by_width = documents.by_width(length, dropping=dropping)
    tokens, held = np.zeros(max(by_width) + 1, dtype=np.int64), []
    for counts, sequences in documents.kept(length, dropping=dropping):
        width = sequences.max(axis=1)
        held.append(counts)
        np.add.at(tokens, width, counts * sequences.sum(axis=1))
    trained = 0.0
    if documents.trained is not None and length is not None and length < documents.longest:
        trained = float(np.concatenate(held) @ documents.counted(length, dropping=dropping) / tokens.sum())
    return _Kept(by_width, {width: int(tokens[width]) for width in by_width}, trained)


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

    counts, tokens = (np.array(list(known.values()), dtype=float) for known in (kept.by_width, kept.tokens_of))
    below = counts.cumsum() / kept.rows
    shares = np.diff(below**rows, prepend=0.0)
    held = np.diff(rows * below ** (rows - 1) * tokens.cumsum() / kept.rows, prepend=0.0)
    drawn = shares > 0
    widths = -(-np.array(list(kept.by_width))[drawn] // multiple) * multiple
    found = representatives(widths, shares[drawn], [held[drawn] / shares[drawn]], known=widest)
    return tuple(
        Typical(
            Shape(
                rows,
                each.tokens,
                filled=min(1.0, each.beside[0] / (rows * each.tokens * sequences)),
                trained=kept.trained,
            ),
            each.share,
        )
        for each in found
    )


def _flat_sizes(kept: _Kept, rows: int, multiple: int, most: int) -> tuple[Typical, ...]:
    """Return sizes that stand for micro-batches of random rows that lie end to end, of ``most`` tokens at most."""
    import numpy as np

    by_length = np.zeros(max(kept.by_width) + 1)
    by_length[list(kept.by_width)] = list(kept.by_width.values())
    tokens, shares = summed(by_length, rows)
    largest = rounded_up(most, multiple)
    found = representatives(-(-tokens // multiple) * multiple, shares, most_tokens=largest, known=largest)
    return tuple(Typical(Shape(1, each.tokens, trained=kept.trained), each.share) for each in found)


def widest_of(counts: Mapping[int, int], rows: int) -> list[tuple[int, float]]:
    """Return the probability of each width to be the largest of ``rows`` random rows."""
    import numpy as np

    widths = sorted(counts)
    upto = np.cumsum([counts[width] for width in widths])
    return list(zip(widths, np.diff((upto / upto[-1]) ** rows, prepend=0.0).tolist(), strict=True))


def share_of(held: int, tokens: int) -> float:
    """Return the share of a micro-batch's tokens that is no padding, rounded up to a thousandth, and 1 at most."""
    return min(1.0, ceil(1000 * held / tokens) / 1000)
