"""Best-fit-decreasing packing, computed on counts of documents by length."""

from __future__ import annotations

from collections.abc import Mapping


def packed_rows(counts: Mapping[int, int], length: int) -> int:
    """Return how many rows of ``length`` tokens hold all documents: the longest first, each where it fits best.

    This is the algorithm of TRL's ``bfd`` strategies (``trl/data_utils.py``, ``_pack_bfd``). Documents of equal length
    are packed together, and rows are counted by the space that is left in them.

    Example: documents of 6, 5, 4 and 3 tokens take two rows of 10: 6 and 4, 5 and 3.

    Args:
        counts: number of documents by their tokens, none of which is above ``length``.
    """
    open_rows: dict[int, int] = {}
    rows = 0
    for tokens in sorted(counts, reverse=True):
        left = counts[tokens]
        while left:
            space = min((space for space in open_rows if space >= tokens), default=None)
            if space is None:
                per_row = length // tokens
                whole, rest = divmod(left, per_row)
                rows += whole + (rest > 0)
                open_rows[length - per_row * tokens] = open_rows.get(length - per_row * tokens, 0) + whole
                if rest:
                    open_rows[length - rest * tokens] = open_rows.get(length - rest * tokens, 0) + 1
                left = 0
            else:
                taken = min(left, open_rows[space])
                left, open_rows[space] = left - taken, open_rows[space] - taken
                open_rows[space - tokens] = open_rows.get(space - tokens, 0) + taken
            open_rows = {room: count for room, count in open_rows.items() if room and count}
    return rows
