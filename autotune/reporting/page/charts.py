"""The charts of the page, as Plotly's figures in dictionaries; colours are names of the style sheet's variables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autotune.reporting.document import Charts, Document, Factor, Histogram, Plane, Point, Predicted
from autotune.reporting.page.drawing import Chart, Figure, plain, scale, vertical_line
from autotune.reporting.page.step_charts import step_charts
from autotune.units import format_bytes, format_rate

# The colours of Okabe and Ito, which people who are colour-blind tell apart (https://jfly.uni-koeln.de/color/); marks
# differ as well.
_RECOMMENDED, _DEFAULT, _OTHER = "var(--recommended)", "var(--default)", "var(--other)"
_FAR = 2
"""How many times the budget candidates may need to be drawn."""
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
    if shown.phases:
        yield Chart("phases", "Memory of each phase", _phases_caption(shown.phases), _phases(shown.phases))
    if shown.factors:
        caption = _choices_caption(shown.factors)
        yield Chart("choices", "What each choice contributed", caption, _choices(shown.factors))
    if shown.lengths is not None:
        yield Chart("lengths", "Length of rows", _lengths_caption(shown.lengths), _lengths(shown.lengths))
    for name, pairs, unit in (("memory", shown.memory, scale), ("speed", shown.speed, _rates)):
        if pairs:
            title = f"{name.capitalize()}: predicted and measured"
            yield Chart(name, title, _pairs_caption(pairs), _pairs(pairs, unit))


def _front(shown: Plane) -> Figure:
    unit, name = scale([point.peak_bytes for point in shown.points])
    traces = []
    best = shown.front
    traces.append({
        "type": "scatter", "mode": "lines", "name": "nothing needs less and is as fast", "hoverinfo": "skip",
        "x": [point.peak_bytes / unit for point in best], "y": [point.tokens_per_second for point in best],
        "line": {"color": _OTHER, "width": 1, "dash": "dot", "shape": "hv"},
    })  # fmt: skip
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
    budget, most, drawn = (
        shown.budget_bytes / unit,
        max(point.peak_bytes for point in shown.points),
        _drawn_up_to(shown),
    )
    fastest = max(point.tokens_per_second for point in shown.points)
    anchor = "right" if shown.budget_bytes > max(drawn, shown.budget_bytes) / 2 else "left"
    reach = {"range": [0, 1.03 * drawn / unit]} if drawn < most else {"rangemode": "tozero"}
    return {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": f"{shown.memory} ({name})"}, **reach},
            "yaxis": {"title": {"text": "tokens per second"}, "range": [0, _HEADROOM * fastest]},
            **vertical_line(budget, f"budget {format_bytes(shown.budget_bytes)}", below_legend=True, anchor=anchor),
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
    return "<br>".join(map(plain, lines))


def _phases(phases: Mapping[str, int]) -> Figure:
    sizes = list(phases.values())[::-1]
    unit, name = scale(sizes)
    return {
        "data": [
            {
                "type": "bar", "orientation": "h", "y": list(phases)[::-1],
                "x": [size / unit for size in sizes], "marker": {"color": _RECOMMENDED},
                "text": [format_bytes(size) for size in sizes], "hoverinfo": "y+text",
            }
        ],
        "layout": {"xaxis": {"title": {"text": f"most memory held ({name})"}}, "yaxis": {"automargin": True}},
    }  # fmt: skip


def _choices(factors: Sequence[Factor]) -> Figure:
    rows = factors[::-1]
    return {
        "data": [
            {
                "type": "bar", "orientation": "h", "y": [plain(item.choice) for item in rows],
                "x": [item.speedup for item in rows],
                "marker": {"color": [_RECOMMENDED if item.told_apart else _OTHER for item in rows]},
                "text": [plain(item.effect) for item in rows], "textposition": "none", "hoverinfo": "text",
            }
        ],
        "layout": {
            "xaxis": {"title": {"text": "speed-up"}, "rangemode": "tozero"},
            "yaxis": {"automargin": True},
            **vertical_line(1.0, "no difference"),
        },
    }  # fmt: skip


def _lengths(shown: Histogram) -> Figure:
    """Return the bars of the bins, all as wide: the bins themselves grow, since lengths are long-tailed."""
    spans = [f"{part.low:,}" if part.low == part.high else f"{part.low:,} to {part.high:,}" for part in shown.bins]
    return {
        "data": [
            {
                "type": "bar", "x": list(range(len(spans))), "y": [part.rows for part in shown.bins],
                "marker": {"color": _DEFAULT},
                "text": [f"{span} tokens: {part.rows:,} rows" for span, part in zip(spans, shown.bins, strict=True)],
                "textposition": "none", "hoverinfo": "text",
            }
        ],
        "layout": {
            "xaxis": {
                "title": {"text": "tokens of a row, up to"}, "tickvals": list(range(len(spans))),
                "ticktext": [f"{part.high:,}" for part in shown.bins], "tickangle": -45,
            },
            "yaxis": {"title": {"text": "rows"}}, "bargap": 0.05,
            **({} if shown.cut is None else vertical_line(_among(shown, shown.cut), f"cut at {shown.cut:,}")),
        },
    }  # fmt: skip


def _among(shown: Histogram, tokens: int) -> float:
    """Return where a length is among bars of the width 1, of which the first has its middle at 0."""
    place = next(place for place, part in enumerate(shown.bins) if tokens <= part.high)
    part = shown.bins[place]
    return place - 0.5 + max(0.0, (tokens - part.low + 1) / (part.high - part.low + 1))


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
                "text": ["<br>".join(map(plain, item.name.split(" "))) for item in pairs],
                "hovertemplate": "%{text}<br>predicted %{x:,.4~g}, measured %{y:,.4~g}<extra></extra>",
            },
        ],
        "layout": {
            "xaxis": {"title": {"text": f"predicted ({name})"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": f"measured ({name})"}, "rangemode": "tozero"},
        },
    }  # fmt: skip


def _rates(_: Sequence[float]) -> tuple[int, str]:
    return 1, "tokens per second"


def _front_caption(shown: Plane) -> str:
    best = "; ".join(f"{format_bytes(one.peak_bytes)} at {format_rate(one.tokens_per_second)}" for one in shown.front)
    budget, drawn = format_bytes(shown.budget_bytes), _drawn_up_to(shown)
    beyond = sum(point.peak_bytes > drawn for point in shown.points)
    best += f". {beyond:,} that need more than {format_bytes(drawn)} are not in the picture" if beyond else ""
    return (
        f"{len(shown.points):,} candidates by {shown.memory} and speed; the budget is {budget}. "
        f"Those that nothing beats in both: {best}."
    )


def _phases_caption(phases: Mapping[str, int]) -> str:
    held = (f"{name} {format_bytes(size)}" for name, size in phases.items())
    return f"The most memory that the recommendation held in each phase: {', '.join(held)}."


def _choices_caption(factors: Sequence[Factor]) -> str:
    known = (f"{item.choice} {item.speedup:.2f}x{'' if item.told_apart else ' (may be chance)'}" for item in factors)
    chance = "" if all(item.told_apart for item in factors) else " Grey: with one probe, it may be chance."
    return f"Each choice, changed back alone, with the effects in the table below: {', '.join(known)}.{chance}"


def _lengths_caption(shown: Histogram) -> str:
    cut = "no row is cut" if shown.cut is None else f"{shown.subject} cuts at {shown.cut:,}"
    return f"{sum(part.rows for part in shown.bins):,} rows of up to {shown.longest:,} tokens; {cut}."


def _pairs_caption(pairs: Sequence[Predicted]) -> str:
    errors = sorted(abs(item.predicted / item.measured - 1) for item in pairs if item.measured)
    middle = f"{100 * errors[len(errors) // 2]:.1f} %" if errors else "unknown"
    return f"{len(pairs)} probes; half of the predictions were within {middle}."
