"""Weighted sums of forecasts."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.core.timeline import Part
from autotune.planning.fit import Forecast
from autotune.planning.times import mixed_times


def mixed(terms: Sequence[tuple[Forecast, float]]) -> Forecast:
    """Return the sum of forecasts, each with its weight; figures that come to less than nothing are nothing."""
    categories: dict[str, float] = {}
    for forecast, weight in terms:
        for name, size in forecast.categories.items():
            categories[name] = categories.get(name, 0.0) + weight * size
    whole = {name: round(size) for name, size in categories.items() if size >= 1}
    parts = [part for part in Part if all(part in forecast.times for forecast, _ in terms)]
    return Forecast(
        peak_bytes=sum(whole.values()),
        categories=whole,
        overhead_bytes=max(0, round(sum(weight * forecast.overhead_bytes for forecast, weight in terms))),
        reserved_ratio=max(1.0, sum(weight * forecast.reserved_ratio for forecast, weight in terms)),
        host_bytes=max(0, round(sum(weight * forecast.host_bytes for forecast, weight in terms))),
        times={part: mixed_times([(forecast.times[part], weight) for forecast, weight in terms]) for part in parts},
    )
