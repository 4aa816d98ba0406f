"""A scatter plot in text of memory against speed."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.reporting.document import Point
from autotune.units import format_bytes

MARKS = {"other": "·", "default": "○", "recommended": "●"}
"""The mark of each role; where points coincide, the later one is seen."""
WIDEST = 100
"""Characters of a line that are enough."""
# Below a third of the budget, points would be too close to the left edge.
_CROWDED = 1 / 3
_HEIGHT = 9


def scatter(drawn: Sequence[Point], budget_bytes: int, width: int) -> list[str]:
    """Return the lines of a scatter plot: speed upwards, memory to the right, both from zero.

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
    for point in sorted(drawn, key=lambda point: list(MARKS).index(point.role)):
        column = min(columns - 1, int(point.peak_bytes / right * columns))
        line = min(_HEIGHT - 1, int((1 - point.tokens_per_second / most_rate) * _HEIGHT))
        grid[line][column] = MARKS[point.role]
    marks = [top, *[""] * (_HEIGHT - 1)]
    lines = [f"{mark:>{len(top)}} ┤{''.join(cells)}".rstrip() for mark, cells in zip(marks, grid, strict=True)]
    end = f"{format_bytes(right)}{' = budget' if right == budget_bytes else ''}"
    return [
        f"{'tok/s':>{len(top)}}",
        *lines,
        f"{'0':>{len(top)}} └{'─' * (columns - 1)}┤",
        f"{'':>{len(top)}}  0{'peak memory':^{max(0, columns - 2 - len(end))}}{end:>{len(end)}}",
    ]
