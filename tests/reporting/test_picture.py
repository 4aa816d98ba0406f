"""The scatter plot places each candidate by its memory and speed."""

from __future__ import annotations

import pytest

from autotune.reporting.document import Document, Plane, Point, Section
from autotune.reporting.terminal import MARKS, scatter
from autotune.units import GIB
from tests.reporting.as_text import as_text

OTHER, BASELINE, RECOMMENDED = MARKS.values()
ROLES = {mark: role for role, mark in MARKS.items()}


def a_point(peak_bytes: int, rate: float, mark: str) -> Point:
    """Return a point of a candidate without a name."""
    return Point("", "", peak_bytes, rate, ROLES[mark])


def drawn(budget_bytes: int, width: int, *points: Point) -> list[str]:
    """Return the lines of the picture of points."""
    return scatter(Plane(points, budget_bytes, (), "memory used"), width)


def place(lines: list[str], mark: str) -> tuple[int, int]:
    """Return the line and the column of the only point with that mark."""
    [found] = [(number, line.index(mark)) for number, line in enumerate(lines) if mark in line]
    return found


def test_faster_is_higher_and_more_memory_is_further_right() -> None:
    lines = drawn(24 * GIB, 80, a_point(20 * GIB, 900.0, RECOMMENDED), a_point(10 * GIB, 300.0, BASELINE))
    (fast_line, far_column), (slow_line, near_column) = place(lines, RECOMMENDED), place(lines, BASELINE)
    assert fast_line < slow_line
    assert far_column > near_column


def test_the_recommendation_is_seen_where_points_coincide() -> None:
    lines = drawn(2 * GIB, 60, *(a_point(GIB, 5.0, mark) for mark in (RECOMMENDED, OTHER, BASELINE)))
    assert place(lines, RECOMMENDED)
    assert not any(OTHER in line or BASELINE in line for line in lines)


def test_the_memory_axis_is_named_and_ends_at_the_budget() -> None:
    axis = drawn(24 * GIB, 80, a_point(20 * GIB, 1.0, OTHER))[-1]
    assert " memory used " in axis
    assert axis.endswith("24.00 GiB = budget")


def test_points_far_below_the_budget_are_spread_over_the_axis() -> None:
    lines = drawn(80 * GIB, 80, a_point(GIB, 1.0, OTHER), a_point(GIB // 2, 0.5, BASELINE))
    assert lines[-1].endswith("1.25 GiB")
    assert place(lines, OTHER)[1] - place(lines, BASELINE)[1] > 20


def test_points_without_memory_are_drawn() -> None:
    assert drawn(24 * GIB, 80, a_point(0, 1.0, OTHER), a_point(0, 2.0, BASELINE))


@pytest.mark.parametrize("width", [1, 8, 20, 41])
def test_a_terminal_that_is_too_narrow_has_no_picture(width: int) -> None:
    points = (a_point(GIB, 23_000.0, RECOMMENDED), a_point(GIB, 1.0, BASELINE))
    found = Document(None, (Section("", (Plane(points, 24 * GIB, (), "memory used"),)),))
    assert as_text(found, width) == ""


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_line_is_wider_than_asked(width: int) -> None:
    assert max(len(line) for line in drawn(24 * GIB, width, a_point(21 * GIB, 23_000.0, RECOMMENDED))) <= width
