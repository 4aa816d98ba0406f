"""The micro-batches of a training: their shapes, and which may need the most memory. One rule for probes and plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Layout(StrEnum):
    """How the rows of a micro-batch lie in its tensor: each layout has attention masks, and so kernels, of its own."""

    EQUAL = "rows of equal length"
    PADDED = "padded rows"
    FLAT = "rows end to end"


@dataclass(frozen=True, order=True)
class Shape:
    """The size of a micro-batch.

    Attributes:
        rows: ``per_device_train_batch_size``; 1 where rows lie end to end.
        tokens: of the widest sequence, padding included, or of the one row; a mean may be no whole number.
    """

    rows: int
    tokens: float


@dataclass(frozen=True)
class BatchGeometry:
    """The micro-batches and optimizer steps that a training plan makes of a dataset.

    Attributes:
        layout: of the worst micro-batch.
        worst: the micro-batch that needs the most memory.
        typical: of mean size.
        tokens: dataset tokens of the typical one, padding excluded.
        micro_batches: of an optimizer step, in one process.
        documents: of the dataset that an optimizer step holds on average, over all processes.
        rows: of an epoch, as the trainer sees them: packed rows, or documents that were not dropped.
        sequences: that each row sends through the model: two for a preference pair.
    """

    layout: Layout
    worst: Shape
    typical: Shape
    tokens: float
    micro_batches: int
    documents: float
    rows: int
    sequences: int = 1


def rounded_up(tokens: int, multiple: int) -> int:
    """Return the smallest multiple that is not below ``tokens``."""
    return -(-tokens // multiple) * multiple


def has_padding(lengths: Iterable[int], multiple: int = 1) -> bool:
    """Return whether rows of these lengths, in tokens, are padded where they share a micro-batch.

    Args:
        multiple: to which the longest is rounded up.
    """
    known = set(lengths)
    return known != {rounded_up(max(known), multiple)}


def worst_micro_batches(
    longest_first: Sequence[int],
    rows: int,
    *,
    padded: bool,
    multiple: int = 1,
    shortest: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """Return the micro-batches that may need the most memory, each as positions in ``longest_first``.

    The longest rows are one of them. Where these have no padding, transformers hands no attention mask to the model;
    one row that is shorter brings the mask, and with sdpa grouped-query attention is lost with it. So the longest
    shorter row takes the place of one of them where there is one. That micro-batch comes first, because its tensors
    have taken at least as many bytes wherever the two were measured or traced; only both tell for sure.

    Example: rows of 512, 512, 512 and 500 tokens, two to a micro-batch, give (512, 500) and (512, 512).

    Args:
        longest_first: tokens of each row's longest sequence as it is trained on, after cutting, in descending order;
            not empty. Of equally long ones, those with a shorter sequence beside it come first.
        rows: of a micro-batch. A dataset of fewer rows repeats them, as a probe does.
        padded: whether sequences are padded to the longest of their micro-batch, instead of being laid end to end.
        multiple: to which that length is rounded up.
        shortest: tokens of each row's shortest sequence, where rows have several; None where they have one.
    """
    known, most = len(longest_first), longest_first[0]
    longest = tuple(position % known for position in range(rows))
    lengths = [tokens[position] for tokens in (longest_first, shortest or ()) if tokens for position in longest]
    if not padded or has_padding(lengths, multiple):
        return (longest,)
    shorter = next((position for position in range(known) if longest_first[position] < most), None)
    # By itself a shorter row is padded, and as large, only where rounding up makes it as long as the longest.
    if shorter is None or (rows == 1 and rounded_up(longest_first[shorter], multiple) < most):
        return (longest,)
    return ((*longest[:-1], shorter), longest)
