"""The charts of the HTML page as Plotly figures: memory against speed, and memory through one step by category."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise
from typing import Any

from autotune.core.documents.memory_timeline import AT_REST, OUTSIDE_TENSORS, VLLM, Mark, MemoryTimeline
from autotune.core.program import CONSTRUCTION
from autotune.core.timeline import Occurrence, Part
from autotune.reporting.document import Charts, Document, Plane, Point, Step, memory_axis
from autotune.units import GIB, MIB, format_bytes, format_rate, format_share, plural

Figure = Mapping[str, Any]
"""Plotly's figure; colours are names of the style sheet's variables."""
_LIMIT = "var(--limit)"
# The colour-blind-safe colours of Okabe and Ito (https://jfly.uni-koeln.de/color/); marks differ as well.
_RECOMMENDED, _DEFAULT, _OTHER = "var(--recommended)", "var(--default)", "var(--other)"
_HEADROOM = 1.18
"""Height of the chart over the fastest candidate, for the label of the budget above all marks."""
_ROLES = {
    "other": (_OTHER, "circle", 8),
    "default": (_DEFAULT, "square", 12),
    "recommended": (_RECOMMENDED, "star", 16),
}
OUTSIDE, _REST = "outside tensors", "other"
# The colours of Okabe and Ito again, one for each part, from the bottom of the stack to its top.
COLOURS = {
    OUTSIDE: "var(--reserve)",
    "parameter": "var(--parameter)",
    "optimizer state": "var(--state)",
    "gradient": "var(--gradient)",
    "activation": "var(--activation)",
    "temporary": "var(--temporary)",
    _REST: "var(--rest)",
    AT_REST: "var(--parameter)",
    VLLM: "var(--vllm)",
}
_NARROWEST = 0.05
"""Least width of a stretch, as a share of the chart."""
_ENTRIES = {"entrywidth": 135, "entrywidthmode": "pixels", "font": {"size": 12}}
"""The columns of a legend: two of them on a telephone."""


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        name: its HTML id.
        caption: its content in sentences, for screen readers.
        tall: whether it needs more height than others, such as for slanted names.
    """

    name: str
    title: str
    caption: str
    figure: Figure
    tall: bool = False


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
    best, (unit, name) = plane.front, _scale(end_bytes)
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
    line = _vertical_line(plane.budget_bytes / unit, label, anchor) if plane.budget_bytes <= end_bytes else {}
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
        f"{plural(len(plane.points), 'candidate')} by {plane.memory} and speed; the budget is "
        f"{format_bytes(plane.budget_bytes)}. Pareto front: {best}."
    )


def step_charts(steps: Sequence[Step], budget_bytes: int) -> list[Chart]:
    """Return a chart of each step with moments, all with the same memory axis."""
    steps = [step for step in steps if step.timeline.moments]
    if not steps:
        return []
    most = memory_axis((step.timeline.need_bytes for step in steps), budget_bytes)
    return [
        Chart(
            f"step_{step.role}",
            f"Memory of one step: {step.name}",
            _caption(step, budget_bytes),
            _course(step.timeline, budget_bytes, most),
            tall=True,
        )
        for step in steps
    ]


@dataclass(frozen=True)
class Stretch:
    """A part of a step, or its forward or backward pass.

    Attributes:
        moments: indices into the timeline.
        most_bytes: its peak memory of tensors and of vLLM.
    """

    name: str
    moments: range
    most_bytes: int


def stretches(timeline: MemoryTimeline) -> tuple[Stretch, ...]:
    """Return the stretches of a step in their order."""
    totals, passes = timeline.totals, {(mark.part, mark.backward) for mark in timeline.marks}
    return tuple(
        Stretch(
            _stretch_name(mark, timeline.micro_batches, with_direction=(mark.part, not mark.backward) in passes),
            moments,
            max((totals[moment] for moment in moments), default=0),
        )
        for place, mark in enumerate(timeline.marks)
        for moments in (timeline.stretch(place),)
    )


def _stretch_name(mark: Mark, micro_batches: int, *, with_direction: bool) -> str:
    """Return the name of a stretch, with the number of its micro-batch if there are several."""
    part = mark.part
    # Construction and the first step, which creates the optimizer state; a longer name has no room below a chart.
    words = "before the step" if part == Part(CONSTRUCTION, Occurrence.BEFORE) else part.phase
    if part.of_micro_batch and micro_batches > 1:
        further = "2" if micro_batches == 2 else f"2 to {micro_batches}"
        words += " 1" if part.occurrence is Occurrence.FIRST else f" {further}"
    return f"{words}, {'backward' if mark.backward else 'forward'}" if with_direction else words


def _course(timeline: MemoryTimeline, budget_bytes: int, most: int) -> Figure:
    unit, name = _scale(most)
    parts = stretches(timeline)
    edges = _edges(parts, timeline.moments)
    moments, places = _spread(parts, edges)
    levels = shown_levels(timeline)
    totals = [sum(sizes[moment] for sizes in levels.values()) for moment in range(timeline.moments)]
    traces: list[Figure] = [
        {
            "type": "scatter", "mode": "lines", "stackgroup": "memory", "name": part, "x": places,
            "y": [round(sizes[moment] / unit, 3) for moment in moments], "line": {"width": 0},
            "fillcolor": COLOURS[part], "hovertemplate": f"%{{y:,.2f}} {name}",
        }
        for part, sizes in levels.items()
    ]  # fmt: skip
    within = {moment: part.name for part in parts for moment in part.moments}
    traces.append({
        "type": "scatter", "mode": "lines", "name": "all", "showlegend": False, "x": places,
        "y": [round(totals[moment] / unit, 3) for moment in moments], "line": {"width": 0},
        "text": [f"{escape(within[moment], quote=False)}: {format_bytes(totals[moment])}" for moment in moments],
        "hovertemplate": "%{text}<extra></extra>",
    })  # fmt: skip
    peak = places[moments.index(timeline.peak)]
    line = _limit_line(budget_bytes / unit, f"budget {format_bytes(budget_bytes)}") if budget_bytes <= most else {}
    return {
        "data": traces,
        "layout": {
            "hovermode": "x unified",
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", **_ENTRIES},
            "xaxis": {
                "tickvals": [round((low + high) / 2, 4) for low, high in pairwise(edges)],
                "ticktext": [escape(part.name, quote=False) for part in parts], "tickangle": -60, "showgrid": False,
                "tickfont": {"size": 11},
                "range": [0, 1], "unifiedhovertitle": {"text": " "},
            },
            "yaxis": {"title": {"text": f"memory ({name})"}, "range": [0, 1.12 * most / unit]},
            "shapes": [
                *line.get("shapes", ()),
                *({"type": "line", "x0": edge, "x1": edge, "y0": 0, "y1": 1, "yref": "paper",
                   "line": {"color": "var(--faint)", "width": 1, "dash": "dot"}} for edge in edges[1:-1]),
            ],
            "annotations": [
                *line.get("annotations", ()),
                {"x": peak, "y": totals[timeline.peak] / unit, "text": f"needs {format_bytes(timeline.need_bytes)}",
                 "showarrow": True, "arrowhead": 2, "arrowcolor": "var(--ink)",
                 "ax": -40 if peak > 0.5 else 40, "ay": -18,
                 "bgcolor": "var(--page)", "bordercolor": "var(--edge)"},
            ],
        },
    }  # fmt: skip


def shown_levels(timeline: MemoryTimeline) -> dict[str, tuple[int, ...]]:
    """Return the bytes at each moment by part; memory outside tensors is one part, constant, as at the peak."""
    at_each = [shown_parts(timeline.at(moment)) for moment in range(timeline.moments)]
    outside = sum(timeline.breakdown.get(name, 0) for name in OUTSIDE_TENSORS)
    levels = {name: tuple(parts.get(name, 0) for parts in at_each) for name in COLOURS}
    levels[OUTSIDE] = (outside,) * timeline.moments
    return {name: sizes for name, sizes in levels.items() if any(sizes)}


def shown_parts(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by part in the order of :data:`COLOURS`, further categories under ``other``, without zeros."""
    found = dict.fromkeys(COLOURS, 0)
    for name, size in sizes.items():
        found[name if name in found else _REST] += size
    return {name: size for name, size in found.items() if size}


def _edges(parts: Sequence[Stretch], moments: int) -> list[float]:
    """Return the borders of the stretches, from 0 to 1: widths are their shares of moments, with a least width."""
    widths = [max(len(part.moments), _NARROWEST * moments) for part in parts]
    return [0.0, *(round(end / sum(widths), 4) for end in accumulate(widths))]


def _spread(parts: Sequence[Stretch], edges: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return moments with their places on the axis; a single moment is repeated to span its stretch."""
    moments: list[int] = []
    places: list[float] = []
    for part, (low, high) in zip(parts, pairwise(edges), strict=True):
        shown = [*part.moments] if len(part.moments) > 1 else [*part.moments] * 2
        moments += shown
        places += [round(low + (high - low) * place / (len(shown) - 1), 4) for place in range(len(shown))]
    return moments, places


def _caption(step: Step, budget_bytes: int) -> str:
    timeline = step.timeline
    parts = stretches(timeline)
    where = next(part.name for part in parts if timeline.peak in part.moments)
    tensors = ", ".join(
        f"{part} {format_bytes(size)}" for part, size in shown_parts(timeline.at(timeline.peak)).items()
    )
    most = "; ".join(f"{part.name} {format_bytes(part.most_bytes)}" for part in parts)
    measured = f" {step.measured}" if step.measured else ""
    outside = timeline.need_bytes - timeline.totals[timeline.peak]
    needs = f"{format_bytes(timeline.need_bytes)} of the {format_bytes(budget_bytes)} are needed"
    allocator = f", {format_bytes(outside)} of them outside tensors" if outside > 0 else ""
    return (
        f"Traced: {needs}, ±{format_share(timeline.error)}{allocator}. The peak of tensors is in {where}: {tensors}."
        f"{measured} Peak in each part (time is not to scale): {most}."
    )


def _vertical_line(at: float, label: str, anchor: str) -> Figure:
    """Return a dashed vertical line with a label for Plotly's layout; ``anchor`` is the label's ``xanchor``."""
    return {
        "shapes": [
            {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper",
             "line": {"color": _LIMIT, "width": 2, "dash": "dash"}}
        ],
        "annotations": [
            {"x": at, "y": 1, "yref": "paper", "yanchor": "top", "xanchor": anchor, "text": label,
             "showarrow": False, "font": {"color": _LIMIT}}
        ],
    }  # fmt: skip


def _limit_line(at: float, label: str) -> Figure:
    """Return a dashed horizontal line with a label above it for Plotly's layout."""
    return {
        "shapes": [
            {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": at, "y1": at, "line": line}
            # The lower line is a border between the upper one and the areas that it crosses.
            for line in ({"color": "var(--page)", "width": 4}, {"color": _LIMIT, "width": 2, "dash": "dash"})
        ],
        "annotations": [
            {"x": 0, "xref": "paper", "y": at, "xanchor": "left", "yanchor": "bottom", "text": label,
             "showarrow": False, "font": {"color": _LIMIT}, "bgcolor": "var(--page)"}
        ],
    }  # fmt: skip


def _scale(most: float) -> tuple[int, str]:
    """Return the unit for sizes of up to ``most`` bytes, and its name."""
    return (GIB, "GiB") if most >= GIB else (MIB, "MiB")
