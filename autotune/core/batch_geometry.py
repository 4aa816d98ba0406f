"""Which micro-batches of a dataset may need the most memory: one rule for probes, traces and plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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
    longest_first: Sequence[int], rows: int, *, padded: bool, multiple: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Return the micro-batches that may need the most memory, each as positions in ``longest_first``.

    The longest rows are one of them. Where these have no padding, transformers hands no attention mask to the model;
    one row that is shorter brings the mask, and with sdpa grouped-query attention is lost with it. So the longest
    shorter row takes the place of one of them where there is one. That micro-batch comes first, because its tensors
    have taken at least as many bytes wherever the two were measured or traced; only both tell for sure.

    Example: rows of 512, 512, 512 and 500 tokens, two to a micro-batch, give (512, 500) and (512, 512).

    Args:
        longest_first: tokens of the rows as they are trained on, after cutting, in descending order; not empty.
        rows: of a micro-batch. A dataset of fewer rows repeats them, as a probe does.
        padded: whether rows are padded to the longest of their micro-batch, instead of being laid end to end.
        multiple: to which that length is rounded up.
    """
    known, most = len(longest_first), longest_first[0]
    longest = tuple(position % known for position in range(rows))
    if not padded or has_padding((longest_first[position] for position in longest), multiple):
        return (longest,)
    shorter = next((position for position in range(known) if longest_first[position] < most), None)
    # By itself a shorter row is padded, and as large, only where rounding up makes it as long as the longest.
    if shorter is None or (rows == 1 and rounded_up(longest_first[shorter], multiple) < most):
        return (longest,)
    return ((*longest[:-1], shorter), longest)
