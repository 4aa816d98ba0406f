"""The charts of the page, as Plotly's figures in dictionaries; colours are names of the style sheet's variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.report.page.values import Histogram, Point, Predicted, Values
from autotune.report.words import BASELINE_NAME
from autotune.units import GIB, MIB, format_bytes, format_rate

Figure = Mapping[str, Any]

# The colours of Okabe and Ito, which people who are colour-blind tell apart (https://jfly.uni-koeln.de/color/); marks
# differ as well.
_RECOMMENDED, _DEFAULT, _OTHER, _LIMIT = "var(--recommended)", "var(--default)", "var(--other)", "var(--limit)"
_ROLES = {
    "other": ("other candidates", _OTHER, "circle", 8),
    "default": (BASELINE_NAME, _DEFAULT, "square", 12),
    "recommended": ("recommended", _RECOMMENDED, "star", 16),
}


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        name: its id in the page.
        title: above it.
        said: what it shows, in sentences, for those who do not see it.
    """

    name: str
    title: str
    said: str
    figure: Figure


def charts(shown: Values) -> tuple[Chart, ...]:
    """Return the charts for which there are figures, in their order on the page."""
    found = []
    if shown.points:
        found.append(Chart("front", "Memory and speed", _said_front(shown), _front(shown)))
    if any(row.peak_bytes is not None for row in shown.phases):
        found.append(Chart("phases", "Memory of each phase", _said_phases(shown), _phases(shown)))
    if any(item.speedup is not None for item in shown.contributions):
        found.append(Chart("choices", "What each choice contributed", _said_choices(shown), _choices(shown)))
    found.append(Chart("lengths", "Length of rows", _said_lengths(shown.lengths), _lengths(shown.lengths)))
    if shown.memory:
        found.append(
            Chart("memory", "Memory: predicted and measured", _said_pairs(shown.memory), _pairs(shown.memory, _scale))
        )
    if shown.speed:
        found.append(
            Chart("speed", "Speed: predicted and measured", _said_pairs(shown.speed), _pairs(shown.speed, _rates))
        )
    return tuple(found)


def _front(shown: Values) -> Figure:
    unit, name = _scale([point.peak_bytes for point in shown.points])
    traces = []
    best = sorted((point for point in shown.points if point.on_front), key=lambda point: point.peak_bytes)
    traces.append({
        "type": "scatter", "mode": "lines", "name": "nothing needs less and is as fast", "hoverinfo": "skip",
        "x": [point.peak_bytes / unit for point in best], "y": [point.tokens_per_second for point in best],
        "line": {"color": _OTHER, "width": 1, "dash": "dot", "shape": "hv"},
    })  # fmt: skip
    for role, (label, colour, symbol, size) in _ROLES.items():
        points = [point for point in shown.points if point.role == role]
        if points:
            traces.append({
                "type": "scatter", "mode": "markers", "name": label,
                "x": [point.peak_bytes / unit for point in points], "y": [point.tokens_per_second for point in points],
                "marker": {"color": colour, "symbol": symbol, "size": size},
                "text": [_hovered(point) for point in points], "hovertemplate": "%{text}<extra></extra>",
            })  # fmt: skip
    budget = shown.budget_bytes / unit
    return {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": f"peak memory ({name})"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "tokens per second"}, "rangemode": "tozero"},
            **_line(budget, f"budget {format_bytes(shown.budget_bytes)}", below_legend=True),
        },
    }


def _hovered(point: Point) -> str:
    figures = f"{format_bytes(point.peak_bytes)}, {format_rate(point.tokens_per_second)}"
    lines = [f"trial {point.number}: {figures}", *point.name.split(" ")]
    return "<br>".join(map(_plain, lines))


def _phases(shown: Values) -> Figure:
    rows = [row for row in reversed(shown.phases) if row.peak_bytes is not None]
    unit, name = _scale([row.peak_bytes or 0 for row in rows])
    return {
        "data": [
            {
                "type": "bar", "orientation": "h", "y": [row.name for row in rows],
                "x": [(row.peak_bytes or 0) / unit for row in rows], "marker": {"color": _RECOMMENDED},
                "text": [format_bytes(row.peak_bytes or 0) for row in rows], "hoverinfo": "y+text",
            }
        ],
        "layout": {"xaxis": {"title": {"text": f"most memory held ({name})"}}, "yaxis": {"automargin": True}},
    }  # fmt: skip


def _choices(shown: Values) -> Figure:
    rows = [item for item in reversed(shown.contributions) if item.speedup is not None]
    return {
        "data": [
            {
                "type": "bar", "orientation": "h", "y": [_plain(item.choice) for item in rows],
                "x": [item.speedup for item in rows], "marker": {"color": _RECOMMENDED},
                "text": [_plain(item.measured) for item in rows], "textposition": "none", "hoverinfo": "text",
            }
        ],
        "layout": {
            "xaxis": {"title": {"text": "speed-up"}, "rangemode": "tozero"},
            "yaxis": {"automargin": True},
            **_line(1.0, "no difference"),
        },
    }  # fmt: skip


def _lengths(shown: Histogram) -> Figure:
    pairs = list(zip(shown.edges[:-1], shown.edges[1:], strict=True))
    return {
        "data": [
            {
                "type": "bar", "x": [(low + high) / 2 for low, high in pairs], "y": list(shown.rows),
                "width": [high - low for low, high in pairs], "marker": {"color": _DEFAULT},
                "text": [f"{low + 1:,} to {high:,} tokens: {rows:,} rows" for (low, high), rows in
                         zip(pairs, shown.rows, strict=True)],
                "textposition": "none", "hoverinfo": "text",
            }
        ],
        "layout": {
            "xaxis": {"title": {"text": "tokens of a row"}}, "yaxis": {"title": {"text": "rows"}}, "bargap": 0.05,
            **({} if shown.cut is None else _line(shown.cut, f"cut at {shown.cut:,}")),
        },
    }  # fmt: skip


def _pairs(pairs: Sequence[Predicted], scale: Any) -> Figure:
    unit, name = scale([item.measured for item in pairs])
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
                "text": ["<br>".join(map(_plain, item.name.split(" "))) for item in pairs],
                "hovertemplate": "%{text}<br>predicted %{x:,.4~g}, measured %{y:,.4~g}<extra></extra>",
            },
        ],
        "layout": {
            "xaxis": {"title": {"text": f"predicted ({name})"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": f"measured ({name})"}, "rangemode": "tozero"},
        },
    }  # fmt: skip


def _line(at: float, label: str, *, below_legend: bool = False) -> Figure:
    """Return a dashed vertical line with its label, above the chart unless its legend is there, for a layout."""
    place = {"yanchor": "top", "xanchor": "right"} if below_legend else {"yanchor": "bottom"}
    return {
        "shapes": [
            {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper",
             "line": {"color": _LIMIT, "width": 2, "dash": "dash"}}
        ],
        "annotations": [
            {"x": at, "y": 1, "yref": "paper", **place, "text": label, "showarrow": False, "font": {"color": _LIMIT}}
        ],
    }  # fmt: skip


def _plain(text: str) -> str:
    """Return text of which Plotly, which reads some HTML in texts, makes the same text."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _scale(sizes: Sequence[float]) -> tuple[int, str]:
    return (GIB, "GiB") if max(sizes) >= GIB else (MIB, "MiB")


def _rates(_: Sequence[float]) -> tuple[int, str]:
    return 1, "tokens per second"


def _said_front(shown: Values) -> str:
    best = sorted((point for point in shown.points if point.on_front), key=lambda point: point.peak_bytes)
    told = "; ".join(f"{format_bytes(one.peak_bytes)} at {format_rate(one.tokens_per_second)}" for one in best)
    return (
        f"{len(shown.points)} candidates by peak memory and speed; the budget is {format_bytes(shown.budget_bytes)}. "
        f"Those that nothing beats in both: {told}."
    )


def _said_phases(shown: Values) -> str:
    held = (f"{row.name} {format_bytes(row.peak_bytes)}" for row in shown.phases if row.peak_bytes is not None)
    return f"The most memory that the recommendation held in each phase: {', '.join(held)}."


def _said_choices(shown: Values) -> str:
    told = (f"{item.choice} {item.speedup:.2f}x" for item in shown.contributions if item.speedup is not None)
    return f"Each choice, changed back alone, as the table below says it: {', '.join(told)}."


def _said_lengths(shown: Histogram) -> str:
    cut = "no row is cut" if shown.cut is None else f"the recommendation cuts at {shown.cut:,}"
    return f"{sum(shown.rows):,} rows of up to {shown.longest:,} tokens; {cut}."


def _said_pairs(pairs: Sequence[Predicted]) -> str:
    errors = sorted(abs(item.predicted / item.measured - 1) for item in pairs if item.measured)
    middle = f"{errors[len(errors) // 2]:.1%}" if errors else "unknown"
    return f"{len(pairs)} probes; half of the predictions were within {middle}."
