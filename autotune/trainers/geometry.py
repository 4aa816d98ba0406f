"""Computes batch geometry from the lengths of documents: padded, packed, or laid end to end, as the trainer chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autotune.core.batch_geometry import BatchGeometry, Layout, Shape, has_padding, rounded_up, worst_micro_batches
from autotune.core.documents import Documents
from autotune.core.plan import TrainingPlan
from autotune.techniques.packing import CUTTING, packed_rows

_REMEMBERED = 4096
# Lengths at which documents are looked through; a search space has a few.
_LENGTHS = 256


def rows_of(plan: TrainingPlan) -> int:
    """Return the rows of a micro-batch, which every plan sets."""
    return int(str(plan.args["per_device_train_batch_size"]))


def micro_batches_of(plan: TrainingPlan) -> int:
    """Return the micro-batches of an optimizer step in one process, which every plan sets."""
    return int(str(plan.args["gradient_accumulation_steps"]))


def evaluated_rows_of(plan: TrainingPlan) -> int:
    """Return the rows of a micro-batch of evaluation, which every plan sets."""
    return int(str(plan.args["per_device_eval_batch_size"]))


def number(plan: TrainingPlan, field: str) -> int | None:
    """Return an argument of a plan if it is a number, else None."""
    value = plan.args.get(field)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@lru_cache(_REMEMBERED)
def padded(
    documents: Documents, rows: int, micro_batches: int, ranks: int, length: int | None, multiple: int
) -> BatchGeometry:
    """Return the geometry of documents that are padded to the widest sequence of their micro-batch.

    Args:
        rows: documents of a micro-batch.
        ranks: processes that train on micro-batches of their own.
        length: to which sequences are cut, or None.
        multiple: to which the widest is rounded up.
    """
    kept = _kept(documents, length)
    by_width, shortest, total, tokens = kept.by_width, kept.shortest, kept.rows, kept.tokens
    longest_first = _longest_first(by_width, rows)
    beside = [shortest[width] for width in longest_first] if documents.sequences > 1 else None
    worst = worst_micro_batches(longest_first, rows, padded=True, multiple=multiple, shortest=beside)[0]
    lengths = [known[position] for known in (longest_first, beside or ()) if known for position in worst]
    typical = sum(share * rounded_up(width, multiple) for width, share in widest_of(by_width, rows))
    return BatchGeometry(
        layout=Layout.PADDED if has_padding(lengths, multiple) else Layout.EQUAL,
        worst=Shape(rows, rounded_up(longest_first[0], multiple)),
        typical=Shape(rows, typical),
        tokens=rows * (tokens / total),
        micro_batches=micro_batches,
        documents=float(rows * micro_batches * ranks),
        rows=total,
        sequences=documents.sequences,
        ranks=ranks,
    )


@lru_cache(_REMEMBERED)
def end_to_end(
    documents: Documents, rows: int, micro_batches: int, ranks: int, length: int | None, multiple: int
) -> BatchGeometry:
    """Return the geometry of documents of one sequence that are laid end to end, padded only as a whole.

    Args:
        multiple: to which all of them together are rounded up.
    """
    kept = _kept(documents, length)
    counts, total, mean = kept.by_width, kept.rows, kept.tokens / kept.rows
    longest_first = _longest_first(counts, rows)
    together = sum(longest_first[position] for position in worst_micro_batches(longest_first, rows, padded=False)[0])
    # Sums of random lengths end anywhere between two multiples.
    typical, held = Shape(1, rows * mean + (multiple - 1) / 2), float(rows * micro_batches * ranks)
    worst = Shape(1, rounded_up(together, multiple))
    return BatchGeometry(Layout.FLAT, worst, typical, rows * mean, micro_batches, held, total, ranks=ranks)


@lru_cache(_REMEMBERED)
def packed(
    documents: Documents,
    rows: int,
    micro_batches: int,
    ranks: int,
    length: int,
    multiple: int,
    strategy: str,
    *,
    flat: bool,
) -> BatchGeometry:
    """Return the geometry of documents of one sequence that are packed into rows of a length.

    Args:
        multiple: to which the rows of a micro-batch are rounded up, as a whole where they lie end to end.
        strategy: in the words of TRL's ``packing_strategy``.
        flat: whether the rows of a micro-batch lie end to end; else they are padded.
    """
    in_epoch = packed_rows(documents, strategy, length)
    held = rows * micro_batches * ranks * documents.rows / in_epoch
    kept = documents.tokens_kept(length, dropping=False) if strategy == CUTTING else documents.tokens
    filled = kept / in_epoch
    if flat:
        worst = Shape(1, rounded_up(rows * length, multiple))
        # Rows are full or nearly so.
        typical = Shape(1, min(worst.tokens, rows * filled + (multiple - 1) / 2))
        return BatchGeometry(Layout.FLAT, worst, typical, rows * filled, micro_batches, held, in_epoch, ranks=ranks)
    # The last row of each packed batch of documents is not full, and is padded if it shares a micro-batch.
    full = kept // length
    short = in_epoch - full
    left = max(1, round((kept - full * length) / short)) if short else 0
    uneven = Documents.of_groups((count, 1, tokens) for count, tokens in ((full, length), (short, left)) if count)
    found = padded(uneven, rows, micro_batches, ranks, None, multiple)
    return replace(found, tokens=rows * filled, documents=held, rows=in_epoch)


@dataclass(frozen=True)
class _Kept:
    """The documents that are left at a maximum length.

    Attributes:
        by_width: their number by the tokens of their longest sequence.
        shortest: the fewest tokens of any sequence of a document of that width.
        tokens: in all sequences.
    """

    by_width: Mapping[int, int]
    shortest: Mapping[int, int]
    tokens: int

    @property
    def rows(self) -> int:
        return sum(self.by_width.values())


@lru_cache(_LENGTHS)
def _kept(documents: Documents, length: int | None) -> _Kept:
    """Return the documents that are kept; if none is, which a probe will report, those that cutting all would leave."""
    import numpy as np

    dropping = length is None or documents.first_kept <= length
    by_width = documents.by_width(length, dropping=dropping)
    shortest = np.arange(max(by_width) + 1)
    for _, sequences in documents.kept(length, dropping=dropping):
        np.minimum.at(shortest, sequences.max(axis=1), sequences.min(axis=1))
    tokens = documents.tokens_kept(length, dropping=dropping)
    return _Kept(by_width, {width: int(shortest[width]) for width in by_width}, tokens)


def widest_of(counts: Mapping[int, int], rows: int) -> list[tuple[int, float]]:
    """Return the probability of each width to be the largest of ``rows`` random rows."""
    total, seen, below, found = sum(counts.values()), 0, 0.0, []
    for tokens in sorted(counts):
        seen += counts[tokens]
        share = (seen / total) ** rows
        found.append((tokens, share - below))
        below = share
    return found


def _longest_first(counts: Mapping[int, int], rows: int) -> Sequence[int]:
    """Return the widths of the ``rows`` widest rows in descending order, then the next smaller width if there is."""
    found: list[int] = []
    for tokens in sorted(counts, reverse=True):
        if len(found) >= rows:
            return [*found, tokens]
        found += [tokens] * min(counts[tokens], rows - len(found))
    return found
