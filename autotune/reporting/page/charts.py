"""The charts of the HTML page as Plotly figures: memory against speed, and the memory of one step."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from autotune.reporting.document import Charts, Document, Plane, Point, memory_axis
from autotune.reporting.page.drawing import Chart, Figure, scale, vertical_line
from autotune.reporting.page.step_charts import step_charts
from autotune.units import counted, format_bytes, format_rate

# The colour-blind-safe colours of Okabe and Ito (https://jfly.uni-koeln.de/color/); marks differ as well.
_RECOMMENDED, _DEFAULT, _OTHER = "var(--recommended)", "var(--default)", "var(--other)"
_HEADROOM = 1.18
"""Height of the chart over the fastest candidate, for the label of the budget above all marks."""
_ROLES = {
    "other": (_OTHER, "circle", 8),
    "default": (_DEFAULT, "square", 12),
    "recommended": (_RECOMMENDED, "star", 16),
}


def charts(document: Document) -> tuple[Chart, ...]:
    """Return the charts of a report, in their order on the page."""
    return tuple(chart for block in document.blocks(Charts) for chart in _charts(block))


def _charts(figures: Charts) -> Iterator[Chart]:
    plane = figures.plane
    if plane.points:
        yield Chart("front", "Memory and speed", _front_caption(plane), _front(plane))
    yield from step_charts(figures.steps, plane.budget_bytes)


def _front(plane: Plane) -> Figure:
    end_bytes = memory_axis((point.peak_bytes for point in plane.points), plane.budget_bytes)
    best, (unit, name) = plane.front, scale([end_bytes])
    traces: list[Figure] = [{
        "type": "scatter", "mode": "lines", "name": "Pareto front", "hoverinfo": "skip",
        "x": [point.peak_bytes / unit for point in best], "y": [point.tokens_per_second for point in best],
        "line": {"color": _OTHER, "width": 1, "dash": "dot", "shape": "hv"},
    }]  # fmt: skip
    legend = dict(plane.legend)
    for role, (colour, symbol, size) in _ROLES.items():
        points = [point for point in plane.points if point.role == role]
        if points:
            traces.append({
                "type": "scatter", "mode": "markers", "name": legend[role],
                "x": [point.peak_bytes / unit for point in points], "y": [point.tokens_per_second for point in points],
                "marker": {"color": colour, "symbol": symbol, "size": size},
                "text": [_hover_text(point) for point in points], "hovertemplate": "%{text}<extra></extra>",
            })  # fmt: skip
    fastest = max(point.tokens_per_second for point in plane.points)
    anchor = "right" if plane.budget_bytes > end_bytes / 2 else "left"
    label = f"budget {format_bytes(plane.budget_bytes)}"
    line = vertical_line(plane.budget_bytes / unit, label, anchor) if plane.budget_bytes <= end_bytes else {}
    return {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": f"{plane.memory} ({name})"}, "range": [0, 1.03 * end_bytes / unit]},
            "yaxis": {"title": {"text": "tokens per second"}, "range": [0, _HEADROOM * fastest]},
            **line,
        },
    }


def _hover_text(point: Point) -> str:
    figures = f"{format_bytes(point.peak_bytes)}, {format_rate(point.tokens_per_second)}"
    lines = [f"{point.label}: {figures}", *point.name.split(" ")]
    # Plotly interprets some HTML.
    return "<br>".join(escape(line, quote=False) for line in lines)


def _front_caption(plane: Plane) -> str:
    best = "; ".join(f"{format_bytes(one.peak_bytes)} at {format_rate(one.tokens_per_second)}" for one in plane.front)
    return (
        f"{counted(len(plane.points), 'candidate')} by {plane.memory} and speed; the budget is "
        f"{format_bytes(plane.budget_bytes)}. Pareto front: {best}."
    )
