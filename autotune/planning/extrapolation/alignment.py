"""Which moments of a model's step are those of a deeper model's: the deeper one has whole layers inserted."""

from __future__ import annotations

from collections.abc import Sequence

# Moments that have to agree after an insertion before it counts as one. Many tell layers whose parts are alike from one
# another; few are enough where less lies between two insertions.
_AGREEING = (48, 24, 12, 6, 3)


def from_start(short: Sequence[str], long: Sequence[str]) -> list[int] | None:
    """Return for each moment of ``short`` the index of its like in ``long``, counting layers from the beginning.

    ``long`` is ``short`` with stretches inserted, each as short as can be; None where it is not.
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
    """Return where ``long`` goes on with ``rest``, or None where it does not."""
    for count in _AGREEING:
        wanted = list(rest[:count])
        for start in range(position + 1, len(long) - len(wanted) + 1):
            if long[start] == wanted[0] and list(long[start : start + len(wanted)]) == wanted:
                return start
    return None


def from_end(short: Sequence[str], long: Sequence[str]) -> list[int] | None:
    """Return the same, counting layers from the end."""
    found = from_start(short[::-1], long[::-1])
    return None if found is None else [len(long) - 1 - index for index in reversed(found)]
