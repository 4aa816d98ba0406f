"""The charts of the page, as Plotly's figures in dictionaries; colours are names of the style sheet's variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autotune.reporting.page.drawing import Chart, Figure, plain, scale, upright
from autotune.reporting.page.step_charts import step_charts
from autotune.reporting.page.values import Histogram, Point, Predicted, Values
from autotune.units import format_bytes, format_rate

# The colours of Okabe and Ito, which people who are colour-blind tell apart (https://jfly.uni-koeln.de/color/); marks
# differ as well.
_RECOMMENDED, _DEFAULT, _OTHER = "var(--recommended)", "var(--default)", "var(--other)"
_FAR = 2
"""How many times the budget candidates may need to be drawn."""
_HEADROOM = 1.18
"""Height of the chart over the fastest candidate, for the label of the budget above all marks."""
_MANY = 200
"""From so many candidates on, their marks are smaller."""
_ROLES = {
    "other": (_OTHER, "circle", 8),
    "default": (_DEFAULT, "square", 12),
    "recommended": (_RECOMMENDED, "star", 16),
}


def charts(shown: Values) -> tuple[Chart, ...]:
    """Return the charts for which there are figures, in their order on the page."""
    found = []
    if shown.points:
        found.append(Chart("front", "Memory and speed", _said_front(shown), _front(shown)))
    found += step_charts(shown.steps, shown.budget_bytes)
    if any(row.peak_bytes is not None for row in shown.phases):
        found.append(Chart("phases", "Memory of each phase", _said_phases(shown), _phases(shown)))
    if any(item.speedup is not None for item in shown.contributions):
        found.append(Chart("choices", "What each choice contributed", _said_choices(shown), _choices(shown)))
    if shown.lengths is not None:
        said = _said_lengths(shown.lengths, shown.words.subject)
        found.append(Chart("lengths", "Length of rows", said, _lengths(shown.lengths)))
    if shown.memory:
        found.append(
            Chart("memory", "Memory: predicted and measured", _said_pairs(shown.memory), _pairs(shown.memory, scale))
        )
    if shown.speed:
        found.append(
            Chart("speed", "Speed: predicted and measured", _said_pairs(shown.speed), _pairs(shown.speed, _rates))
        )
    return tuple(found)


def _front(shown: Values) -> Figure:
    unit, name = scale([point.peak_bytes for point in shown.points])
    traces = []
    best = sorted((point for point in shown.points if point.on_front), key=lambda point: point.peak_bytes)
    traces.append({
        "type": "scatter", "mode": "lines", "name": "nothing needs less and is as fast", "hoverinfo": "skip",
        "x": [point.peak_bytes / unit for point in best], "y": [point.tokens_per_second for point in best],
        "line": {"color": _OTHER, "width": 1, "dash": "dot", "shape": "hv"},
    })  # fmt: skip
    legend = {"other": "other candidates", "default": shown.words.beside, "recommended": shown.words.chosen}
    for role, (colour, symbol, size) in _ROLES.items():
        points = [point for point in shown.points if point.role == role]
        if points:
            traces.append({
                "type": "scatter", "mode": "markers", "name": legend[role],
                "x": [point.peak_bytes / unit for point in points], "y": [point.tokens_per_second for point in points],
                "marker": {"color": colour, "symbol": symbol, "size": size if len(points) < _MANY else size / 2},
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
            "xaxis": {"title": {"text": f"{shown.words.memory} ({name})"}, **reach},
            "yaxis": {"title": {"text": "tokens per second"}, "range": [0, _HEADROOM * fastest]},
            **upright(budget, f"budget {format_bytes(shown.budget_bytes)}", below_legend=True, anchor=anchor),
        },
    }


def _drawn_up_to(shown: Values) -> float:
    """Return the memory up to which candidates are drawn: those far above the budget would make the rest small."""
    compared = (1.05 * point.peak_bytes for point in shown.points if point.role != "other")
    return min(
        max(point.peak_bytes for point in shown.points), max(_FAR * shown.budget_bytes, max(compared, default=0.0))
    )


def _hovered(point: Point) -> str:
    figures = f"{format_bytes(point.peak_bytes)}, {format_rate(point.tokens_per_second)}"
    lines = [f"{point.label}: {figures}", *point.name.split(" ")]
    return "<br>".join(map(plain, lines))


def _phases(shown: Values) -> Figure:
    rows = [row for row in reversed(shown.phases) if row.peak_bytes is not None]
    unit, name = scale([row.peak_bytes or 0 for row in rows])
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
                "type": "bar", "orientation": "h", "y": [plain(item.choice) for item in rows],
                "x": [item.speedup for item in rows],
                "marker": {"color": [_RECOMMENDED if item.told_apart else _OTHER for item in rows]},
                "text": [plain(item.measured) for item in rows], "textposition": "none", "hoverinfo": "text",
            }
        ],
        "layout": {
            "xaxis": {"title": {"text": "speed-up"}, "rangemode": "tozero"},
            "yaxis": {"automargin": True},
            **upright(1.0, "no difference"),
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
            **({} if shown.cut is None else upright(_among(shown, shown.cut), f"cut at {shown.cut:,}")),
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


def _said_front(shown: Values) -> str:
    best = sorted((point for point in shown.points if point.on_front), key=lambda point: point.peak_bytes)
    told = "; ".join(f"{format_bytes(one.peak_bytes)} at {format_rate(one.tokens_per_second)}" for one in best)
    budget, drawn = format_bytes(shown.budget_bytes), _drawn_up_to(shown)
    beyond = sum(point.peak_bytes > drawn for point in shown.points)
    told += f". {beyond:,} that need more than {format_bytes(drawn)} are not in the picture" if beyond else ""
    return (
        f"{len(shown.points):,} candidates by {shown.words.memory} and speed; the budget is {budget}. "
        f"Those that nothing beats in both: {told}."
    )


def _said_phases(shown: Values) -> str:
    held = (f"{row.name} {format_bytes(row.peak_bytes)}" for row in shown.phases if row.peak_bytes is not None)
    return f"The most memory that the recommendation held in each phase: {', '.join(held)}."


def _said_choices(shown: Values) -> str:
    known = [item for item in shown.contributions if item.speedup is not None]
    told = (f"{item.choice} {item.speedup:.2f}x{'' if item.told_apart else ' (may be chance)'}" for item in known)
    chance = "" if all(item.told_apart for item in known) else " Grey: one probe does not tell it from chance."
    return f"Each choice, changed back alone, as the table below says it: {', '.join(told)}.{chance}"


def _said_lengths(shown: Histogram, subject: str) -> str:
    cut = "no row is cut" if shown.cut is None else f"{subject} cuts at {shown.cut:,}"
    return f"{sum(part.rows for part in shown.bins):,} rows of up to {shown.longest:,} tokens; {cut}."


def _said_pairs(pairs: Sequence[Predicted]) -> str:
    errors = sorted(abs(item.predicted / item.measured - 1) for item in pairs if item.measured)
    middle = f"{100 * errors[len(errors) // 2]:.1f} %" if errors else "unknown"
    return f"{len(pairs)} probes; half of the predictions were within {middle}."
