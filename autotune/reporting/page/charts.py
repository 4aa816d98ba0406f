"""The charts of the HTML page as Plotly figures: memory against speed, predictions against measurements, one step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from autotune.reporting.document import Charts, Document, Plane, Point, Predicted
from autotune.reporting.page.drawing import Chart, Figure, scale, vertical_line
from autotune.reporting.page.step_charts import step_charts
from autotune.units import counted, format_bytes, format_rate

# The colour-blind-safe colours of Okabe and Ito (https://jfly.uni-koeln.de/color/); marks differ as well.
_RECOMMENDED, _DEFAULT, _OTHER = "var(--recommended)", "var(--default)", "var(--other)"
_FAR = 2
"""Limit of the memory axis, as a multiple of the budget."""
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
    if figures.memory:
        unit, name = scale([item.measured for item in figures.memory])
        title = "Memory: predicted and measured"
        yield Chart("memory", title, _pairs_caption(figures.memory), _pairs(figures.memory, unit, name))
    if figures.speed:
        title = "Speed: predicted and measured"
        yield Chart("speed", title, _pairs_caption(figures.speed), _pairs(figures.speed, 1, "tokens per second"))


def _front(plane: Plane) -> Figure:
    unit, name = scale([point.peak_bytes for point in plane.points])
    best = plane.front
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
    most, drawn = max(point.peak_bytes for point in plane.points), _largest_drawn(plane)
    fastest = max(point.tokens_per_second for point in plane.points)
    anchor = "right" if plane.budget_bytes > max(drawn, plane.budget_bytes) / 2 else "left"
    reach = {"range": [0, 1.03 * drawn / unit]} if drawn < most else {"rangemode": "tozero"}
    return {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": f"{plane.memory} ({name})"}, **reach},
            "yaxis": {"title": {"text": "tokens per second"}, "range": [0, _HEADROOM * fastest]},
            **vertical_line(plane.budget_bytes / unit, f"budget {format_bytes(plane.budget_bytes)}", anchor),
        },
    }


def _largest_drawn(plane: Plane) -> float:
    """Return the end of the memory axis in bytes: candidates far above the budget would compress the rest."""
    compared = (1.05 * point.peak_bytes for point in plane.points if point.role != "other")
    return min(
        max(point.peak_bytes for point in plane.points), max(_FAR * plane.budget_bytes, max(compared, default=0.0))
    )


def _hover_text(point: Point) -> str:
    figures = f"{format_bytes(point.peak_bytes)}, {format_rate(point.tokens_per_second)}"
    lines = [f"{point.label}: {figures}", *point.name.split(" ")]
    return _html_lines(lines)


def _html_lines(lines: Iterable[str]) -> str:
    """Return lines as text for Plotly, which interprets some HTML."""
    return "<br>".join(escape(line, quote=False) for line in lines)


def _pairs(pairs: Sequence[Predicted], unit: int, name: str) -> Figure:
    most = max(max(item.predicted, item.measured) for item in pairs) / unit
    return {
        "data": [
            {
                "type": "scatter", "mode": "lines", "name": "as predicted", "hoverinfo": "skip",
                "x": [0, most], "y": [0, most], "line": {"color": _OTHER, "dash": "dot", "width": 1},
            },
            {
                "type": "scatter", "mode": "markers", "name": "probes",
                "x": [item.predicted / unit for item in pairs], "y": [item.measured / unit for item in pairs],
                "marker": {"color": _RECOMMENDED, "size": 8},
                "text": [_html_lines(item.name.split(" ")) for item in pairs],
                "hovertemplate": "%{text}<br>predicted %{x:,.4~g}, measured %{y:,.4~g}<extra></extra>",
            },
        ],
        "layout": {
            "xaxis": {"title": {"text": f"predicted ({name})"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": f"measured ({name})"}, "rangemode": "tozero"},
        },
    }  # fmt: skip


def _front_caption(plane: Plane) -> str:
    best = "; ".join(f"{format_bytes(one.peak_bytes)} at {format_rate(one.tokens_per_second)}" for one in plane.front)
    budget, drawn = format_bytes(plane.budget_bytes), _largest_drawn(plane)
    beyond = sum(point.peak_bytes > drawn for point in plane.points)
    best += f". {beyond:,} that need more than {format_bytes(drawn)} are not in the picture" if beyond else ""
    return (
        f"{counted(len(plane.points), 'candidate')} by {plane.memory} and speed; the budget is {budget}. "
        f"Pareto front: {best}."
    )


def _pairs_caption(pairs: Sequence[Predicted]) -> str:
    errors = sorted(abs(item.predicted / item.measured - 1) for item in pairs if item.measured)
    middle = f"{100 * errors[len(errors) // 2]:.1f} %" if errors else "unknown"
    return f"{counted(len(pairs), 'probe')}; half of the predictions were within {middle}."
