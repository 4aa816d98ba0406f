"""The charts of memory through one step, stacked by category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise

from autotune.core.memory_timeline import AT_REST, OUTSIDE_TENSORS, VLLM, Mark, MemoryTimeline
from autotune.core.program import CONSTRUCTION
from autotune.core.timeline import Occurrence, Part
from autotune.reporting.document import Step, memory_axis
from autotune.reporting.page.drawing import Chart, Figure, horizontal_limit, scale
from autotune.units import format_bytes, format_share

OUTSIDE, _OTHER = "outside tensors", "other"
# The colours of Okabe and Ito again, one for each part, from the bottom of the stack to its top.
COLOURS = {
    OUTSIDE: "var(--reserve)",
    "parameter": "var(--parameter)",
    "optimizer state": "var(--state)",
    "gradient": "var(--gradient)",
    "activation": "var(--activation)",
    "temporary": "var(--temporary)",
    _OTHER: "var(--rest)",
    AT_REST: "var(--parameter)",
    VLLM: "var(--vllm)",
}
_NARROWEST = 0.05
"""Least width of a stretch, as a share of the chart."""
_ENTRIES = {"entrywidth": 135, "entrywidthmode": "pixels", "font": {"size": 12}}
"""The columns of a legend: two of them on a telephone."""


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
    unit, name = scale([most])
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
    line = horizontal_limit(budget_bytes / unit, f"budget {format_bytes(budget_bytes)}") if budget_bytes <= most else {}
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
        found[name if name in found else _OTHER] += size
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
