"""Chooses the layer counts to trace so that the full depth can be extrapolated, and weights their figures."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

# The first and the last layer run with different tensors held, so a trace needs both.
_FEWEST = 2
# Two at either end: see autotune.planning.extrapolation.series.LAYERS_AT_EDGES.
_WITH_EDGES = 4


def traced_depths(kinds: Sequence[str], every: int = 1, *, edges: bool = False) -> tuple[int, ...]:
    """Return the one or two depths from which the full depth can be extrapolated.

    Both end with the same kind of layer as the whole model. The deeper one has one more period of the layers' pattern.
    If that is no less than the whole model, only the whole model is traced.

    Example: 32 equal layers give ``(2, 3)``; 32 layers of two alternating kinds give ``(2, 4)``.

    Args:
        kinds: the kind of each layer, in order.
        every: a period that a technique adds, such as checkpointing every second layer.
        edges: whether the first and the last periods are unlike those between, so that there have to be more.
    """
    layers = len(kinds)
    start, period = _repetition(kinds)
    period = lcm(period, every)
    first = start + (layers - start) % period
    while first < max(_FEWEST, start + period * (_WITH_EDGES if edges else 1)):
        first += period
    return (layers,) if first + period >= layers else (first, first + period)


def layer_weights(known: Sequence[int], wanted: int) -> tuple[float, ...]:
    """Return the weights of one or two known depths in the figures at the wanted depth, which are affine in layers.

    Raises:
        ValueError: a single depth is known, and it is not the wanted one.
    """
    if len(known) == 1:
        if known[0] != wanted:
            raise ValueError(f"{wanted} layers do not follow from {known[0]}")
        return (1.0,)
    short, long = known
    share = (wanted - short) / (long - short)
    return (1.0 - share, share)


def _repetition(kinds: Sequence[str]) -> tuple[int, int]:
    """Return the layer at which the pattern starts to repeat, and its period; the smallest sum of the two is taken."""
    layers = len(kinds)
    found = (
        (start, period)
        for total in range(1, layers + 1)
        for period in range(1, total + 1)
        for start in (total - period,)
        if all(kinds[index] == kinds[index + period] for index in range(start, layers - period))
    )
    return next(found, (0, layers or 1))
