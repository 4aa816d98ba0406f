"""Adds up forecasts with weights, those of many micro-batches at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from math import isnan
from operator import attrgetter
from typing import Any

import numpy as np

from autotune.core.step_time import StepTime
from autotune.core.timeline import Occurrence, Part
from autotune.planning.extrapolation.forecast import Forecast, Stretch
from autotune.planning.extrapolation.times import Figures, weighted_sum

_TIMES = len(fields(StepTime))
_figures = attrgetter(*(field.name for field in fields(StepTime)))
_BYTES = ("workspace_bytes", "unused_bytes", "host_bytes", "machine_bytes")


class Table:
    """Forecasts of one technique combination for several micro-batches, as arrays.

    Attributes:
        rows: number of forecasts.
        stretches: those of any forecast.
        names: the categories of bytes in each stretch.
        parts: those whose time any forecast has.
    """

    def __init__(self, forecasts: Sequence[Forecast]) -> None:
        self._forecasts = forecasts
        self.rows = len(forecasts)
        # The longest first, which has the others' parts in their order: a step of one micro-batch lacks some.
        longest_first = sorted(forecasts, key=lambda forecast: -len(forecast.stretches))
        self.stretches = _union(forecast.stretches for forecast in longest_first)
        found = (forecast.stretches.items() for forecast in longest_first)
        self.names = _union([(stretch, name) for stretch, levels in items for name in levels] for items in found)
        self.parts = _union(forecast.times for forecast in longest_first)

    @cached_property
    def sizes(self) -> Figures:
        """Bytes by name, with a last column of zeros; shape (forecasts, names + 1)."""
        places = {name: column for column, name in enumerate(self.names)}
        found = np.zeros((self.rows, len(places) + 1))
        for row, forecast in zip(found, self._forecasts, strict=True):
            for stretch, levels in forecast.stretches.items():
                for name, size in levels.items():
                    row[places[stretch, name]] = size
        return found

    @cached_property
    def times(self) -> Figures:
        """Times by part, NaN where there is none, and a last part of NaN; shape (forecasts, parts + 1, figures)."""
        places = {part: column for column, part in enumerate(self.parts)}
        found = np.full((self.rows, len(places) + 1, _TIMES), np.nan)
        for row, forecast in zip(found, self._forecasts, strict=True):
            for part, time in forecast.times.items():
                row[places[part]] = _figures(time)
        return found

    @property
    def between(self) -> Occurrence:
        """The occurrence of a micro-batch that stands for others, which the forecasts have in common."""
        return next((forecast.between for forecast in self._forecasts), Occurrence.FURTHER)

    @cached_property
    def others(self) -> Figures:
        """What the allocator adds, and bytes on the host; shape (forecasts, figures)."""
        return np.array(
            [(forecast.rounding_share, *(getattr(forecast, name) for name in _BYTES)) for forecast in self._forecasts]
        )


def mixed(terms: Sequence[tuple[Forecast, float]]) -> Forecast:
    """Return the weighted sum of forecasts, as :func:`mixed_rows` does."""
    return mixed_rows([(Table([forecast]), weight) for forecast, weight in terms])[0]


def mixed_rows(terms: Sequence[tuple[Table, float]]) -> list[Forecast]:
    """Return the weighted sums of the forecasts in the same row of each table; negative figures become 0.

    Each stretch of a step is summed separately, because the stretch that a technique changes may not hold the peak. The
    time of a part is left out where one of the forecasts has none.
    """
    weights = [weight for _, weight in terms]
    tables = [table for table, _ in terms]
    stretches = _union(table.stretches for table in tables)
    names = _union(table.names for table in tables)
    sizes = weighted_sum([table.sizes[:, _columns(table.names, names)] for table in tables], weights)
    bytes_of = np.where(sizes >= 1, np.rint(sizes), 0.0).astype(np.int64).tolist()
    parts = tables[0].parts
    times = np.maximum(0.0, weighted_sum([table.times[:, _columns(table.parts, parts)] for table in tables], weights))
    others = np.maximum(0.0, weighted_sum([table.others for table in tables], weights)).tolist()
    return [
        Forecast(
            stretches=_levels(stretches, names, levels),
            rounding_share=rounding_share,
            **dict(zip(_BYTES, map(round, added), strict=True)),
            times=dict(_times(parts, figures)),
            between=tables[0].between,
        )
        for levels, figures, (rounding_share, *added) in zip(bytes_of, times.tolist(), others, strict=True)
    ]


def _union(given: Iterable[Iterable[Any]]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(item for items in given for item in items))


def _columns(known: Sequence[object], wanted: Sequence[object]) -> list[int]:
    """Return where the wanted items are among the known ones; the place after the last where they are not."""
    places = {item: place for place, item in enumerate(known)}
    return [places.get(item, len(known)) for item in wanted]


def _levels(
    stretches: Sequence[Stretch], names: Sequence[tuple[Stretch, str]], sizes: Sequence[int]
) -> Mapping[Stretch, Mapping[str, int]]:
    found: dict[Stretch, dict[str, int]] = {stretch: {} for stretch in stretches}
    for (stretch, name), size in zip(names, sizes, strict=True):
        if size:
            found[stretch][name] = size
    return found


def _times(parts: Sequence[Part], figures: Sequence[Sequence[float]]) -> Iterator[tuple[Part, StepTime]]:
    for part, (seconds, matmul, attention, elementwise, copies, launches, flops, sent) in zip(
        parts, figures, strict=True
    ):
        if not isnan(seconds):
            yield part, StepTime(seconds, matmul, attention, elementwise, copies, launches, round(flops), sent)
