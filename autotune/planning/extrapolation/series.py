"""The memory of the whole model at the moments of a stretch of a step, in order and at its highest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Figures = NDArray[np.float64]
SeriesLevels = Mapping[str, Figures]
"""Bytes by category at each moment."""
LAYERS_AT_EDGES = 2
"""How many layers, or periods of layers, at either end are unlike those between where an engine gathers ahead.

DeepSpeed gathers the embedding, which is larger than its bucket, more than one layer before the backward pass ends."""
Levels = Mapping[str, int]
"""Bytes by category at one moment, without those that have none."""


class Highest(NamedTuple):
    """The moment with the most bytes: its name, as :class:`autotune.core.timeline.Section` has it, and its bytes."""

    moment: str
    levels: Levels


@dataclass(frozen=True)
class Aligned:
    """A stretch of the whole model's step, at the moments that all traces share.

    Example: of traces of two and of three layers, the moments of two layers are shared. Aligned from the start they are
    those of the first two layers, aligned from the end those of the last two.

    Attributes:
        names: of the moments, as :class:`autotune.core.timeline.Section` has them.
        start, end: extrapolated bytes at the same moments, aligned from either side.
        layer_moments: for each moment, how many moments further on it is in the deeper trace if aligned from the end:
            as many as the additional layers have. 0 where it is not one of the layers'.
        apart: for each moment, whether the two sides differ in any trace: in chunks of the loss too.
        insertions: how often what the deeper trace adds comes in the whole model.
        edges: whether the first layers and the last ones are unlike those between, because weights are gathered before
            they are needed. The first are then aligned from the start alone, and the last from the end.
    """

    names: Sequence[str]
    start: SeriesLevels
    end: SeriesLevels
    layer_moments: Sequence[int]
    apart: Sequence[bool]
    insertions: int
    edges: bool = False

    def highest(self) -> Highest:
        """Return the moment with the largest total."""
        last, first = self._at_edges() if self.edges else ([], [])
        found = (self._highest(self.start, last), self._highest(self.end, first))
        return max(found, key=lambda highest: sum(highest.levels.values()))

    def _highest(self, levels: SeriesLevels, left_out: Collection[int]) -> Highest:
        totals = sum(levels.values(), start=np.zeros(len(self.names)))
        totals[list(left_out)] = -np.inf
        moment = int(np.argmax(totals))
        return Highest(self.names[moment], _rounded({name: figures[moment] for name, figures in levels.items()}))

    def _at_edges(self) -> tuple[list[int], list[int]]:
        """Return the moments in the last layers of each pass, and those in the first."""
        last: list[int] = []
        first: list[int] = []
        for in_layers, run in groupby(
            range(len(self.layer_moments)), key=lambda moment: self.layer_moments[moment] > 0
        ):
            moments = list(run)
            period = max(self.layer_moments[moment] for moment in moments)
            if in_layers and len(moments) > LAYERS_AT_EDGES * period:
                last += moments[-LAYERS_AT_EDGES * period :]
                first += moments[: LAYERS_AT_EDGES * period]
        return last, first

    def course(self) -> Iterator[Levels]:
        """Yield the bytes at the moments of the stretch, in order.

        Between the first layers and the last ones, memory changes evenly from layer to layer.
        """
        first, last = self.start, self.end
        kinds = zip(self.apart, self.layer_moments, strict=True)
        for (apart, period), run in groupby(enumerate(kinds), key=lambda item: item[1]):
            moments = [moment for moment, _ in run]
            places = [(moment, 0.0) for moment in moments]
            if apart:
                added = range(max(0, self.insertions * period - len(moments)))
                within = moments[-period:]
                places += [(within[place % len(within)], (1 + place // period) / self.insertions) for place in added]
                places += [(moment, 1.0) for moment in moments]
            for moment, share in places:
                yield _rounded({name: _between(first[name], last[name], moment, share) for name in first})


def _between(first: Figures, last: Figures, moment: int, share: float) -> float:
    # Both ends as they are: their highest moments are the forecast's.
    low, high = float(first[moment]), float(last[moment])
    return low if share == 0 else high if share == 1 else low + share * (high - low)


def _rounded(sizes: Mapping[str, float]) -> Levels:
    return {name: round(size) for name, size in sizes.items() if round(size) > 0}
