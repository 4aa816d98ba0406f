"""Aligns the moments of a step with those of a deeper model's step, which has whole layers inserted."""

from __future__ import annotations

from collections.abc import Sequence

# How many moments have to agree after an insertion for it to be accepted; tried in this order. Long matches distinguish
# layers with similar parts; short ones are needed where two insertions are close to each other.
_AGREEING = (48, 24, 12, 6, 3)


def from_start(short: Sequence[str], long: Sequence[str]) -> list[int] | None:
    """Return, for each moment of ``short``, the index of the matching moment in ``long``, matching from the beginning.

    ``long`` has to be ``short`` with moments inserted; each insertion is taken to be as short as possible. Returns None
    if it is not.

    Example: ``short`` is ``a b``, ``long`` is ``a x x b``; the result is ``[0, 3]``.
    """
    found: list[int] = []
    position = 0
    while len(found) < len(short):
        place = len(found)
        if position >= len(long) or short[place] != long[position]:
            after = _after_insertion(short[place:], long, position)
            if after is None:
                return None
            position = after
        found.append(position)
        position += 1
    return found


def _after_insertion(rest: Sequence[str], long: Sequence[str], position: int) -> int | None:
    """Return the index at which ``long`` continues with ``rest``, or None if it does not."""
    for count in _AGREEING:
        wanted = list(rest[:count])
        for start in range(position + 1, len(long) - len(wanted) + 1):
            if long[start] == wanted[0] and list(long[start : start + len(wanted)]) == wanted:
                return start
    return None


def from_end(short: Sequence[str], long: Sequence[str]) -> list[int] | None:
    """Return the same as :func:`from_start`, matching from the end."""
    found = from_start(short[::-1], long[::-1])
    return None if found is None else [len(long) - 1 - index for index in reversed(found)]
