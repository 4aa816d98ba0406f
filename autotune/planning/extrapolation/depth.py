"""How few layers show what all do: layers come in kinds that repeat."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

# The first and the last layer differ in what is held while they run, so that both have to be there.
_FEWEST = 2


def traced_depths(kinds: Sequence[str], every: int = 1) -> tuple[int, ...]:
    """Return the one or two depths from which all others of the same kinds follow.

    Both end like the whole model: the deeper one has one more of the periods that the layers repeat in.

    Args:
        kinds: of each layer, in order.
        every: a period that a technique adds, such as checkpointing every second layer.
    """
    layers = len(kinds)
    start, period = _repetition(kinds)
    period = lcm(period, every)
    first = start + (layers - start) % period
    while first < max(_FEWEST, start + period):
        first += period
    return (layers,) if first + period >= layers else (first, first + period)


def _repetition(kinds: Sequence[str]) -> tuple[int, int]:
    """Return where the repetition begins and how long its period is, for the least of both together."""
    layers = len(kinds)
    found = (
        (start, period)
        for total in range(1, layers + 1)
        for period in range(1, total + 1)
        for start in (total - period,)
        if all(kinds[index] == kinds[index + period] for index in range(start, layers - period))
    )
    return next(found, (0, layers or 1))
