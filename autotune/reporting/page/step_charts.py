"""The charts of the memory of one step: its course, stacked by category, and its parts at the peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from autotune.core.memory_timeline import BESIDE_TENSORS, VLLM, MemoryTimeline
from autotune.reporting.page.drawing import Chart, Figure, level, plain, scale, vertical_line
from autotune.reporting.steps import Step, Stretch, shown_levels, shown_parts, stretches
from autotune.units import format_bytes, format_share

# The colours of Okabe and Ito again, one for each part; memory outside tensors has one colour and three patterns.
_COLOURS = {
    **dict.fromkeys(BESIDE_TENSORS, "var(--reserve)"),
    "parameter": "var(--parameter)",
    "training at rest": "var(--parameter)",
    "optimizer state": "var(--state)",
    "gradient": "var(--gradient)",
    "activation": "var(--activation)",
    "temporary": "var(--temporary)",
    "other": "var(--rest)",
    VLLM: "var(--vllm)",
}
_PATTERNS = {"rounding": "/", "fragmentation": "x"}
_OUTSIDE = "outside tensors"
_NARROWEST = 0.05
"""Share of a chart that the shortest stretch has."""
_ENTRIES = {"entrywidth": 135, "entrywidthmode": "pixels", "font": {"size": 12}}
"""The columns of a legend: two of them on a telephone."""
_FAR = 4
"""A budget this many times as large as what is needed is not drawn: nothing else would be seen."""


def step_charts(steps: Sequence[Step], budget_bytes: int) -> list[Chart]:
    """Return a chart of each step's course, with the same axis, and one of all their parts."""
    if not steps:
        return []
    most = max(step.timeline.need_bytes for step in steps)
    most = budget_bytes if most < budget_bytes < _FAR * most else most
    courses = [
        Chart(
            f"step_{step.role}",
            f"Memory of one step: {step.name}",
            _step_caption(step, budget_bytes),
            _course(step.timeline, budget_bytes, most),
            tall=True,
        )
        for step in steps
    ]
    parts = _breakdown(steps, budget_bytes, most)
    return [Chart("breakdown", "Memory at the peak", _parts_caption(steps), parts, tall=True), *courses]


def _course(timeline: MemoryTimeline, budget_bytes: int, most: int) -> Figure:
    unit, name = scale([most])
    parts = stretches(timeline)
    edges = _edges(parts, timeline.moments)
    moments, places = _spread(parts, edges)
    levels = _together(shown_levels(timeline))
    totals = [sum(sizes[moment] for sizes in levels.values()) for moment in range(timeline.moments)]
    traces: list[Figure] = [
        {
            "type": "scatter", "mode": "lines", "stackgroup": "memory", "name": part, "x": places,
            "y": [round(sizes[moment] / unit, 3) for moment in moments], "line": {"width": 0},
            "fillcolor": _COLOURS.get(part, "var(--reserve)"), "hovertemplate": f"%{{y:,.2f}} {name}",
        }
        for part, sizes in levels.items()
    ]  # fmt: skip
    within = {moment: part.name for part in parts for moment in part.moments}
    traces.append({
        "type": "scatter", "mode": "lines", "name": "all", "showlegend": False, "x": places,
        "y": [round(totals[moment] / unit, 3) for moment in moments], "line": {"width": 0},
        "text": [f"{plain(within[moment])}: {format_bytes(totals[moment])}" for moment in moments],
        "hovertemplate": "%{text}<extra></extra>",
    })  # fmt: skip
    peak = places[moments.index(timeline.peak)]
    line = level(budget_bytes / unit, f"budget {format_bytes(budget_bytes)}") if budget_bytes <= most else {}
    return {
        "data": traces,
        "layout": {
            "hovermode": "x unified",
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", **_ENTRIES},
            "xaxis": {
                "tickvals": [round((low + high) / 2, 4) for low, high in pairwise(edges)],
                "ticktext": [plain(part.name) for part in parts], "tickangle": -60, "showgrid": False,
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


def _together(levels: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return the levels with all memory outside tensors as one part, which is constant."""
    outside = [sizes for name, sizes in levels.items() if name in BESIDE_TENSORS]
    rest = {name: sizes for name, sizes in levels.items() if name not in BESIDE_TENSORS}
    return {**({_OUTSIDE: [sum(sizes) for sizes in zip(*outside, strict=True)]} if outside else {}), **rest}


def _edges(parts: Sequence[Stretch], moments: int) -> list[float]:
    """Return where stretches begin and end, from 0 to 1: as wide as they have moments, short ones somewhat wider."""
    widths = [max(len(part.moments), _NARROWEST * moments) for part in parts]
    return [0.0, *(round(end / sum(widths), 4) for end in accumulate(widths))]


def _spread(parts: Sequence[Stretch], edges: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return moments with their places: each stretch goes from its beginning to its end, one of one moment too."""
    moments: list[int] = []
    places: list[float] = []
    for part, (low, high) in zip(parts, pairwise(edges), strict=True):
        shown = [*part.moments] if len(part.moments) > 1 else [*part.moments] * 2
        moments += shown
        places += [round(low + (high - low) * place / (len(shown) - 1), 4) for place in range(len(shown))]
    return moments, places


def _breakdown(steps: Sequence[Step], budget_bytes: int, most: int) -> Figure:
    unit, name = scale([most])
    shown = {step.name: shown_parts(step.timeline.breakdown) for step in reversed(steps)}
    names = dict.fromkeys(part for parts in shown.values() for part in parts)
    traces: list[dict[str, Any]] = [
        {
            "type": "bar", "orientation": "h", "name": part, "y": [plain(step) for step in shown],
            "x": [parts.get(part, 0) / unit for parts in shown.values()],
            "marker": {
                "color": _COLOURS[part],
                "pattern": {"shape": _PATTERNS.get(part, ""), "fillmode": "overlay", "fgcolor": "var(--page)"},
            },
            "text": [f"{part}: {format_bytes(parts.get(part, 0))}" for parts in shown.values()],
            "textposition": "none", "hoverinfo": "text",
        }
        for part in _ordered(names)
    ]  # fmt: skip
    line = (
        vertical_line(budget_bytes / unit, f"budget {format_bytes(budget_bytes)}", anchor="right")
        if budget_bytes <= most
        else {}
    )
    return {
        "data": traces,
        "layout": {
            "barmode": "stack", "bargap": 0.35,
            "xaxis": {
                "ticksuffix": f" {name}", "showticksuffix": "last", "range": [0, 1.05 * most / unit], "nticks": 5,
                "tickangle": 0,
            },
            "legend": {"orientation": "h", "x": 0, "y": -0.15, "yanchor": "top", "traceorder": "normal", **_ENTRIES},
            **line,
        },
    }  # fmt: skip


def _ordered(names: Mapping[str, None]) -> list[str]:
    return [name for name in _COLOURS if name in names]


def _step_caption(step: Step, budget_bytes: int) -> str:
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
        f"{needs}{allocator}, within {format_share(timeline.error)}; traced. The most is held in {where}: {tensors}."
        f"{measured} Most that tensors hold in each part, which is not drawn to scale in time: {most}."
    )


def _parts_caption(steps: Sequence[Step]) -> str:
    steps_text = []
    for step in steps:
        parts = ", ".join(f"{part} {format_bytes(size)}" for part, size in shown_parts(step.timeline.breakdown).items())
        steps_text.append(
            f"{step.name[:1].upper()}{step.name[1:]} needs {format_bytes(step.timeline.need_bytes)}: {parts}."
        )
    return " ".join(steps_text)
