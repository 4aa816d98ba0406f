"""Parts of Plotly figures that several charts have: limit lines, and the unit of an axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.units import GIB, MIB

Figure = Mapping[str, Any]
"""Plotly's figure; colours are names of the style sheet's variables."""
LIMIT = "var(--limit)"


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


def vertical_line(at: float, label: str, anchor: str) -> Figure:
    """Return a dashed vertical line with a label for Plotly's layout; ``anchor`` is the label's ``xanchor``."""
    return {
        "shapes": [
            {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper",
             "line": {"color": LIMIT, "width": 2, "dash": "dash"}}
        ],
        "annotations": [
            {"x": at, "y": 1, "yref": "paper", "yanchor": "top", "xanchor": anchor, "text": label,
             "showarrow": False, "font": {"color": LIMIT}}
        ],
    }  # fmt: skip


def horizontal_limit(at: float, label: str) -> Figure:
    """Return a dashed horizontal line with a label above it for Plotly's layout."""
    return {
        "shapes": [
            {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": at, "y1": at, "line": line}
            # The lower line is a border between the upper one and the areas that it crosses.
            for line in ({"color": "var(--page)", "width": 4}, {"color": LIMIT, "width": 2, "dash": "dash"})
        ],
        "annotations": [
            {"x": 0, "xref": "paper", "y": at, "xanchor": "left", "yanchor": "bottom", "text": label,
             "showarrow": False, "font": {"color": LIMIT}, "bgcolor": "var(--page)"}
        ],
    }  # fmt: skip


def scale(sizes: Sequence[float]) -> tuple[int, str]:
    """Return the unit for sizes, in bytes, and its name."""
    return (GIB, "GiB") if max(sizes) >= GIB else (MIB, "MiB")
