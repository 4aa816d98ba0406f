"""Which moments of a model's step are those of a deeper model's: the deeper one has whole layers inserted."""

from __future__ import annotations

from collections.abc import Sequence

# Moments that have to agree after an insertion before it counts as one. A layer of a transformer has more.
_AGREEING = 12


def from_start(short: Sequence[str], long: Sequence[str]) -> list[int] | None:
    """Return for each moment of ``short`` the index of its like in ``long``, counting layers from the beginning.

    ``long`` is ``short`` with stretches inserted, each as short as can be; None where it is not.
    """
    found: list[int] = []
    position = 0
    while len(found) < len(short):
        place = len(found)
        if position < len(long) and short[place] == long[position]:
            found.append(position)
            position += 1
            continue
        wanted = list(short[place : place + _AGREEING])
        starts = range(position + 1, len(long) - len(wanted) + 1)
        after = next((start for start in starts if list(long[start : start + len(wanted)]) == wanted), None)
        if after is None:
            return None
        position = after
    return found


def from_end(short: Sequence[str], long: Sequence[str]) -> list[int] | None:
    """Return the same, counting layers from the end."""
    found = from_start(short[::-1], long[::-1])
    return None if found is None else [len(long) - 1 - index for index in reversed(found)]
