"""The charts of the page, as Plotly's figures in dictionaries; colours are names of the style sheet's variables."""

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
"""Largest memory of drawn candidates, as a multiple of the budget."""
_HEADROOM = 1.18
"""Height of the chart over the fastest candidate, for the label of the budget above all marks."""
_ROLES = {
    "other": (_OTHER, "circle", 8),
    "default": (_DEFAULT, "square", 12),
    "recommended": (_RECOMMENDED, "star", 16),
}


def charts(document: Document) -> tuple[Chart, ...]:
    """Return the charts for which a report has figures, in their order on the page."""
    return tuple(chart for block in document.blocks(Charts) for chart in _charts(block))


def _charts(shown: Charts) -> Iterator[Chart]:
    plane = shown.plane
    if plane.points:
        yield Chart("front", "Memory and speed", _front_caption(plane), _front(plane))
    yield from step_charts(shown.steps, plane.budget_bytes)
    if shown.memory:
        unit, name = scale([item.measured for item in shown.memory])
        title = "Memory: predicted and measured"
        yield Chart("memory", title, _pairs_caption(shown.memory), _pairs(shown.memory, unit, name))
    if shown.speed:
        title = "Speed: predicted and measured"
        yield Chart("speed", title, _pairs_caption(shown.speed), _pairs(shown.speed, 1, "tokens per second"))


def _front(shown: Plane) -> Figure:
    unit, name = scale([point.peak_bytes for point in shown.points])
    best = shown.front
    traces: list[Figure] = [{
        "type": "scatter", "mode": "lines", "name": "Pareto front", "hoverinfo": "skip",
        "x": [point.peak_bytes / unit for point in best], "y": [point.tokens_per_second for point in best],
        "line": {"color": _OTHER, "width": 1, "dash": "dot", "shape": "hv"},
    }]  # fmt: skip
    legend = dict(shown.legend)
    for role, (colour, symbol, size) in _ROLES.items():
        points = [point for point in shown.points if point.role == role]
        if points:
            traces.append({
                "type": "scatter", "mode": "markers", "name": legend[role],
                "x": [point.peak_bytes / unit for point in points], "y": [point.tokens_per_second for point in points],
                "marker": {"color": colour, "symbol": symbol, "size": size},
                "text": [_hovered(point) for point in points], "hovertemplate": "%{text}<extra></extra>",
            })  # fmt: skip
    most, drawn = max(point.peak_bytes for point in shown.points), _drawn_up_to(shown)
    fastest = max(point.tokens_per_second for point in shown.points)
    anchor = "right" if shown.budget_bytes > max(drawn, shown.budget_bytes) / 2 else "left"
    reach = {"range": [0, 1.03 * drawn / unit]} if drawn < most else {"rangemode": "tozero"}
    return {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": f"{shown.memory} ({name})"}, **reach},
            "yaxis": {"title": {"text": "tokens per second"}, "range": [0, _HEADROOM * fastest]},
            **vertical_line(shown.budget_bytes / unit, f"budget {format_bytes(shown.budget_bytes)}", anchor),
        },
    }


def _drawn_up_to(shown: Plane) -> float:
    """Return the memory up to which candidates are drawn: those far above the budget would make the rest small."""
    compared = (1.05 * point.peak_bytes for point in shown.points if point.role != "other")
    return min(
        max(point.peak_bytes for point in shown.points), max(_FAR * shown.budget_bytes, max(compared, default=0.0))
    )


def _hovered(point: Point) -> str:
    figures = f"{format_bytes(point.peak_bytes)}, {format_rate(point.tokens_per_second)}"
    lines = [f"{point.label}: {figures}", *point.name.split(" ")]
    return _joined(lines)


def _joined(lines: Iterable[str]) -> str:
    """Return lines of text for Plotly, which reads some HTML in texts."""
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
                "text": [_joined(item.name.split(" ")) for item in pairs],
                "hovertemplate": "%{text}<br>predicted %{x:,.4~g}, measured %{y:,.4~g}<extra></extra>",
            },
        ],
        "layout": {
            "xaxis": {"title": {"text": f"predicted ({name})"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": f"measured ({name})"}, "rangemode": "tozero"},
        },
    }  # fmt: skip


def _front_caption(shown: Plane) -> str:
    best = "; ".join(f"{format_bytes(one.peak_bytes)} at {format_rate(one.tokens_per_second)}" for one in shown.front)
    budget, drawn = format_bytes(shown.budget_bytes), _drawn_up_to(shown)
    beyond = sum(point.peak_bytes > drawn for point in shown.points)
    best += f". {beyond:,} that need more than {format_bytes(drawn)} are not in the picture" if beyond else ""
    return (
        f"{counted(len(shown.points), 'candidate')} by {shown.memory} and speed; the budget is {budget}. "
        f"Pareto front: {best}."
    )


def _pairs_caption(pairs: Sequence[Predicted]) -> str:
    errors = sorted(abs(item.predicted / item.measured - 1) for item in pairs if item.measured)
    middle = f"{100 * errors[len(errors) // 2]:.1f} %" if errors else "unknown"
    return f"{counted(len(pairs), 'probe')}; half of the predictions were within {middle}."
