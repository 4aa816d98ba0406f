"""A scatter plot in text of memory against speed, for all candidates that ran."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.result import Result
from autotune.core.status import ProbeStatus
from autotune.units import format_bytes

RECOMMENDED, BASELINE, OTHER = "●", "○", "·"
_ORDER = (OTHER, BASELINE, RECOMMENDED)
# Below a third of the budget, points would be too close to the left edge.
_CROWDED = 1 / 3
_HEIGHT = 9


@dataclass(frozen=True)
class Point:
    """One candidate: its peak in bytes, its rate in tokens per second, and the mark it is drawn with."""

    peak_bytes: int
    tokens_per_second: float
    mark: str


def points(result: Result) -> tuple[Point, ...]:
    """Return a point for every candidate that ran to the end; the two compared ones with their compared figures."""
    compared = {
        one.candidate: (one.peak_bytes, one.tokens_per_second, mark)
        for one, mark in ((result.baseline, BASELINE), (result.recommended, RECOMMENDED))
        if one is not None
    }
    others = {
        trial.candidate: (trial.peak_bytes, trial.tokens_per_second, OTHER)
        for trial in result.trials
        if trial.status is ProbeStatus.OK
    }
    return tuple(
        Point(peak, rate, mark)
        for peak, rate, mark in {**others, **compared}.values()
        if peak is not None and rate is not None
    )


def scatter(drawn: tuple[Point, ...], budget_bytes: int, width: int) -> list[str]:
    """Return the lines of a scatter plot: speed upwards, memory to the right, both from zero.

    Where points coincide, the recommendation is drawn over the baseline, and both over the others.

    Args:
        drawn: at least one point.
        budget_bytes: the end of the memory axis, unless all points are far below it or one is beyond it.
        width: characters in a line, at least 40.
    """
    most_peak = max(point.peak_bytes for point in drawn)
    most_rate = max(point.tokens_per_second for point in drawn)
    right = max(budget_bytes, most_peak) if most_peak > budget_bytes * _CROWDED else round(most_peak * 1.25)
    top = f"{most_rate:,.0f}"
    columns = width - len(top) - 3
    grid = [[" "] * columns for _ in range(_HEIGHT)]
    for point in sorted(drawn, key=lambda point: _ORDER.index(point.mark)):
        column = min(columns - 1, int(point.peak_bytes / right * columns))
        line = min(_HEIGHT - 1, int((1 - point.tokens_per_second / most_rate) * _HEIGHT))
        grid[line][column] = point.mark
    marks = [top, *[""] * (_HEIGHT - 1)]
    lines = [f"{mark:>{len(top)}} ┤{''.join(cells)}".rstrip() for mark, cells in zip(marks, grid, strict=True)]
    end = f"{format_bytes(right)}{' = budget' if right == budget_bytes else ''}"
    return [
        f"{'tok/s':>{len(top)}}",
        *lines,
        f"{'0':>{len(top)}} └{'─' * (columns - 1)}┤",
        f"{'':>{len(top)}}  0{'peak memory':^{max(0, columns - 2 - len(end))}}{end:>{len(end)}}",
    ]
