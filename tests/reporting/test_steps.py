"""The memory of one step in a report has the figures of the timeline, named, stacked and drawn."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest

from autotune.core.documents.memory_timeline import OUTSIDE_TENSORS, MemoryTimeline
from autotune.reporting import page as home
from autotune.reporting.document import Bar, Charts, Step, Table
from autotune.reporting.page.charts import COLOURS, charts, shown_levels, step_charts, stretches
from autotune.reporting.probe import probe_report
from autotune.units import GIB
from tests.reporting.examples import a_result, a_timeline, traced

# https://jfly.uni-koeln.de/color/, and a grey.
OKABE_ITO = {"#0072b2", "#cc79a7", "#d55e00", "#009e73", "#e69f00", "#f0e442", "#56b4e9", "#999999"}


def course(timeline: MemoryTimeline, budget_bytes: int = 24 * GIB) -> Any:
    """Return the figure of a step."""
    (chart,) = step_charts([Step("recommended", "recommended", timeline)], budget_bytes)
    return chart.figure


def on_a_cpu(timeline: MemoryTimeline) -> MemoryTimeline:
    """Return a timeline with the process in the place of what a GPU's allocator and driver hold."""
    tensors = {name: size for name, size in timeline.breakdown.items() if name not in OUTSIDE_TENSORS}
    return replace(timeline, breakdown={**tensors, "process": 4 * GIB})


@pytest.mark.parametrize("timeline", [a_timeline(), on_a_cpu(a_timeline())], ids=["gpu", "cpu"])
def test_every_byte_of_a_moment_is_in_one_part(timeline: MemoryTimeline) -> None:
    levels = shown_levels(timeline)
    beside = 4 * GIB
    assert tuple(levels) == tuple(part for part in COLOURS if part in levels)
    assert [sum(sizes[moment] for sizes in levels.values()) for moment in range(timeline.moments)] == [
        total + beside for total in timeline.totals
    ]
    assert max(map(sum, zip(*levels.values(), strict=True))) == timeline.need_bytes == 20 * GIB


def test_stretches_are_named_by_their_micro_batches_and_passes() -> None:
    assert [part.name for part in stretches(a_timeline(micro_batches=8))] == [
        "before the step", "micro-batch 1, forward", "micro-batch 1, backward",
        "micro-batch 2 to 8, forward", "micro-batch 2 to 8, backward", "optimizer step",
    ]  # fmt: skip
    assert stretches(a_timeline())[3].name == "micro-batch 2, forward"
    assert stretches(a_timeline(micro_batches=1))[1].name == "micro-batch, forward"


def test_the_stack_reaches_the_need_at_the_peak_and_the_line_is_the_budget() -> None:
    figure = course(a_timeline())
    stacked = [trace["y"] for trace in figure["data"] if "stackgroup" in trace]
    assert max(map(sum, zip(*stacked, strict=True))) == pytest.approx(20)
    assert figure["layout"]["shapes"][0]["y0"] == 24
    assert [note["text"] for note in figure["layout"]["annotations"]] == ["budget 24.00 GiB", "needs 20.00 GiB"]
    xs = figure["data"][0]["x"]
    assert (xs[0], xs[-1]) == (0, 1)
    assert xs == sorted(xs)


def test_a_part_of_a_single_moment_is_wide_enough_to_be_seen() -> None:
    figure = course(a_timeline())
    first, second, *_ = figure["data"][0]["x"]
    assert second - first >= 0.03


def test_a_budget_far_above_is_told_and_not_drawn() -> None:
    figure = course(a_timeline(), budget_bytes=640 * GIB)
    assert [note["text"] for note in figure["layout"]["annotations"]] == ["needs 20.00 GiB"]
    assert figure["layout"]["yaxis"]["range"][1] < 30


def test_both_steps_are_drawn_with_the_same_axis_and_each_part_has_its_colour() -> None:
    found = {chart.name: chart for chart in charts(probe_report(traced()))}
    assert found.keys() >= {"step_recommended", "step_default"}
    ranges = [found[name].figure["layout"]["yaxis"]["range"] for name in ("step_recommended", "step_default")]
    assert ranges[0] == ranges[1]
    for name in ("step_recommended", "step_default"):
        colours = [trace["fillcolor"] for trace in found[name].figure["data"] if trace["name"] != "all"]
        assert len(set(colours)) == len(colours)


def test_the_parts_of_the_need_of_both_are_a_table_that_adds_up() -> None:
    shown = probe_report(traced())
    (table,) = (table for table in shown.blocks(Table) if table.columns[0] == "memory at peak")
    assert table.columns == ("memory at peak", "recommended", "", "TRL's default", "")
    assert table.rows[0] == ("parameter", "4.00 GiB", Bar(4 / 24), "4.00 GiB", Bar(4 / 24, "default"))
    assert [row[:2] for row in table.rows[-2:]] == [("sum", "20.00 GiB"), ("memory budget", "24.00 GiB")]
    assert sum(float(str(row[1]).split()[0]) for row in table.rows[:-2]) == 20


def test_the_colours_are_ones_that_colour_blind_people_tell_apart() -> None:
    style = (files(home) / "page.css").read_text(encoding="utf-8")
    parts = ("parameter", "state", "gradient", "activation", "temporary", "rest", "vllm", "reserve")
    colours = [found for part in parts for found in re.findall(rf"--{part}: (#[0-9a-f]+);", style)]
    assert set(colours) == OKABE_ITO
    assert len(colours) == len(parts)


def test_the_charts_are_told_in_words() -> None:
    told = {chart.name: chart.caption for chart in charts(probe_report(traced()))}
    assert told["step_recommended"].startswith(
        "Traced: 20.00 GiB of the 24.00 GiB are needed, ±10.0 %, 4.00 GiB of them outside tensors. The peak of tensors "
        "is in micro-batch 2, forward: parameter 4.00 GiB"
    )
    assert "Probes measured 22.00 GiB reserved" in told["step_recommended"]
    assert "optimizer step 11.00 GiB" in told["step_recommended"]


def test_measured_memory_of_a_cpu_includes_what_a_trace_leaves_out() -> None:
    one = traced()
    assert one.recommended is not None
    on_cpu = replace(one, recommended=replace(one.recommended, reserved_bytes=None, peak_bytes=3 << 30))
    (chart,) = (chart for chart in charts(probe_report(on_cpu)) if chart.name == "step_recommended")
    assert "Probes measured 3.00 GiB of resident memory, which includes the reading of rows and images" in chart.caption


def test_what_was_not_traced_is_not_drawn() -> None:
    assert "step_" not in "".join(chart.name for chart in charts(probe_report(a_result())))
    one = traced()
    assert one.baseline is not None
    (half,) = probe_report(replace(one, baseline=replace(one.baseline, timeline=None))).blocks(Charts)
    assert [step.role for step in half.steps] == ["recommended"]
