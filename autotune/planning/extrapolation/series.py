"""Extrapolated memory of the whole model at the moments of a stretch of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

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
Places = NDArray[np.intp]


@dataclass(frozen=True)
class Aligned:
    """A stretch of the whole model's step, at the moments that all traces share.

    Example: traces of two and of three layers share the moments of two layers: the first two if aligned from the start,
    the last two if aligned from the end.

    Attributes:
        names: names of the moments, as in :class:`autotune.core.timeline.Section`.
        start, end: extrapolated bytes at these moments, aligned from the start and from the end.
        layer_moments: number of moments of the additional layers, by which both alignments differ in the deeper trace;
            0 for a moment outside the layers.
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

    def highest(self) -> tuple[str, Levels]:
        """Return the name and the bytes of the moment with the most bytes."""
        moments, levels = self._whole(interpolated=False)
        highest = int(np.argmax(sum(levels.values(), start=np.zeros(len(moments)))))
        return self.names[moments[highest]], _nonzero({name: sizes[highest] for name, sizes in levels.items()})

    def course(self) -> list[Levels]:
        """Return the bytes at the moments of the stretch, in order."""
        moments, levels = self._whole()
        return [_nonzero({name: sizes[at] for name, sizes in levels.items()}) for at in range(len(moments))]

    def _whole(self, *, interpolated: bool = True) -> tuple[Places, SeriesLevels]:
        """Return the shared moment behind each moment of the whole stretch, and the bytes at each of these; with or
        without the interpolated moments between the first layers and the last, which are not above these."""
        first, last, shares = map(np.concatenate, zip(*self._pieces(interpolated=interpolated), strict=True))
        levels = {
            name: np.maximum(0.0, np.floor(start[first] + shares * (self.end[name][last] - start[first])))
            for name, start in self.start.items()
        }
        return last, levels

    def _pieces(self, *, interpolated: bool) -> Iterator[tuple[Places, Places, Figures]]:
        """Yield for consecutive moments those aligned from the start and from the end, and the shares of the latter.

        The first layer is aligned from the start only: from the end, it is the second of the deeper trace, and their
        difference would count once per further layer.
        """
        for in_layers, run in groupby(range(len(self.layer_moments)), key=lambda each: self.layer_moments[each] > 0):
            moments = np.array([*run], dtype=np.intp)
            if not in_layers:
                yield moments, moments, np.zeros(len(moments))
                continue
            period = max(self.layer_moments[moment] for moment in moments)
            # Align at least one period from either side.
            most = max(0, len(moments) // period - 1)
            last, first = (min(LAYERS_AT_EDGES, most),) * 2 if self.edges else (0, min(1, most))
            start, end = moments[: len(moments) - last * period], moments[first * period :]
            yield start, start, np.zeros(len(start))
            if interpolated:
                added = np.arange(max(0, self.insertions * period + len(moments) - len(start) - len(end)))
                # `before` is shorter than a period if the added layer has more moments than the shallow trace's layer.
                before = start[-period:]
                alike = (end - before[:, None]) % period == 0
                place = added % len(before)
                high = np.where(alike.any(axis=1)[place], end[alike.argmax(axis=1)[place]], end[added % len(end)])
                yield before[place], high, (1 + added // period) / (1 + len(added) / period)
            yield end, end, np.ones(len(end))


def _nonzero(sizes: Mapping[str, float]) -> Levels:
    return {name: round(size) for name, size in sizes.items() if size}
