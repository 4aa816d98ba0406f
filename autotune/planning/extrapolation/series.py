"""Extrapolated memory of the whole model at the moments of a stretch of a step, and its highest moment."""

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
"""Layers, or periods of layers, at either end that differ from those between if an engine prefetches weights.

DeepSpeed gathers the embedding, which is larger than its bucket, more than one layer before the backward pass ends."""
Levels = Mapping[str, int]
"""Bytes by category at one moment, without those that have none."""


class Highest(NamedTuple):
    """The moment with the most bytes: its name as in :class:`autotune.core.timeline.Section`, and its bytes."""

    moment: str
    levels: Levels


@dataclass(frozen=True)
class Aligned:
    """A stretch of the whole model's step, at the moments that all traces share.

    Example: traces of two and of three layers share the moments of two layers: the first two if aligned from the start,
    the last two if aligned from the end.

    Attributes:
        names: names of the moments, as in :class:`autotune.core.timeline.Section`.
        start, end: extrapolated bytes at these moments, aligned from the start and from the end.
        layer_moments: distance of each moment between both alignments in the deeper trace: the number of moments of the
            additional layers, or 0 for a moment outside the layers.
        insertions: number of repetitions of the additional layers in the whole model.
        edges: whether the first and last layers differ from those between, because weights are prefetched. If so, the
            first are aligned from the start only, and the last from the end.
    """

    names: Sequence[str]
    start: SeriesLevels
    end: SeriesLevels
    layer_moments: Sequence[int]
    insertions: int
    edges: bool = False

    def highest(self) -> Highest:
        """Return the moment with the largest total."""
        last = [moment for run in self._runs() for moment in run.moments[run.from_start :]]
        first = [moment for run in self._runs() for moment in run.moments[: -run.from_end]]
        candidates = (self._highest(self.start, last), self._highest(self.end, first))
        return max(candidates, key=lambda highest: sum(highest.levels.values()))

    def _highest(self, levels: SeriesLevels, excluded: Collection[int]) -> Highest:
        totals = sum(levels.values(), start=np.zeros(len(self.names)))
        totals[list(excluded)] = -np.inf
        moment = int(np.argmax(totals))
        return Highest(self.names[moment], _rounded({name: figures[moment] for name, figures in levels.items()}))

    def course(self) -> Iterator[Levels]:
        """Yield the bytes at the moments of the stretch, in order.

        Memory is interpolated linearly from the first layers to the last ones.
        """
        first, last = self.start, self.end
        for moments, period, from_start, from_end in self._runs():
            for moment in moments[:from_start]:
                yield _rounded({name: figures[moment] for name, figures in first.items()})
            if not period:
                continue
            before, after = moments[:from_start][-period:], moments[-from_end:]
            added = max(0, self.insertions * period + len(moments) - from_start - from_end)
            for index in range(added):
                # `before` is shorter than a period if the added layer has more moments than the shallow trace's layer.
                low = before[index % len(before)]
                high = next((moment for moment in after if (moment - low) % period == 0), after[index % len(after)])
                share = (1 + index // period) / (1 + added / period)
                yield _rounded({name: size + share * (last[name][high] - size) for name, size in _at(first, low)})
            for moment in after:
                yield _rounded({name: figures[moment] for name, figures in last.items()})

    def _runs(self) -> Iterator[_Run]:
        for in_layers, run in groupby(range(len(self.layer_moments)), key=lambda each: self.layer_moments[each] > 0):
            moments = list(run)
            period = max(self.layer_moments[moment] for moment in moments) if in_layers else 0
            # Align at least one period from either side.
            most = max(0, len(moments) // period - 1) if period else 0
            last, first = (min(LAYERS_AT_EDGES, most),) * 2 if self.edges else (0, min(1, most))
            yield _Run(moments, period, len(moments) - last * period, len(moments) - first * period)


class _Run(NamedTuple):
    """Consecutive moments: those of the layers of a pass, or those outside the layers.

    Aligned from the end, the first layer of the shallow trace is the second of the deeper one, and their difference
    would count once per further layer. So the first layer is aligned from the start only.

    Attributes:
        period: number of moments of the additional layers; 0 outside the layers.
        from_start: number of moments, from the first, that are aligned from the start.
        from_end: number of moments, from the last, that are aligned from the end.
    """

    moments: Sequence[int]
    period: int
    from_start: int
    from_end: int


def _at(course: SeriesLevels, moment: int) -> Iterator[tuple[str, float]]:
    for name, figures in course.items():
        yield name, float(figures[moment])


def _rounded(sizes: Mapping[str, float]) -> Levels:
    return {name: round(size) for name, size in sizes.items() if round(size) > 0}
