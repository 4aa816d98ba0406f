"""The values of a report, before they are drawn or written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.documents.result import Result
from autotune.core.status import RunStatus
from autotune.reporting.document import (
    Bar,
    Candidates,
    Charts,
    Facts,
    Paragraph,
    Plane,
    Point,
    Table,
    Tone,
    Verdict,
)
from autotune.reporting.page.charts import charts
from autotune.reporting.probe import probe_report
from autotune.units import GIB
from tests.reporting.examples import (
    a_choosable,
    a_result,
    nothing_fits,
    only_the_default_fits,
    traced,
)
from tests.reporting.pages import markdown


def verdict(result: Result) -> Verdict:
    """Return the verdict of a report."""
    found = probe_report(result).verdict
    assert found is not None
    return found


def figures(result: Result) -> Charts:
    """Return what a page draws."""
    (found,) = probe_report(result).blocks(Charts)
    return found


def test_the_verdict_and_its_choices_are_those_of_the_terminal() -> None:
    shown = verdict(a_result())
    assert shown.tone is Tone.GOOD
    assert "packing=bfd" in shown.choices.split()
    assert "trl sft --config " in shown.command


@pytest.mark.parametrize(
    ("confirmed", "said"),
    [(True, "Confirmed by a longer run with the worst batch."), (False, "Not confirmed by a longer run.")],
)
def test_the_page_of_an_interrupted_search_says_so_first(confirmed: bool, said: str) -> None:
    stopped = a_result(status=RunStatus.INTERRUPTED, confirmed=confirmed)
    text = f"Interrupted: this is the best so far. {said}"
    assert verdict(stopped).remarks[0] == Paragraph(text, Tone.UNSURE)
    tone = Tone.GOOD if confirmed else Tone.UNSURE
    assert verdict(a_result(confirmed=confirmed)).remarks[0] == Paragraph(said, tone)


def test_where_nothing_fits_there_is_no_command_and_what_might_help_is_told() -> None:
    shown = verdict(nothing_fits())
    assert shown.tone is Tone.BAD
    assert shown.command == ""
    assert "Effect of each choice" not in markdown(nothing_fits())
    assert "Compared with" not in markdown(nothing_fits())
    _, _, help_ = markdown(nothing_fits()).partition("## What might change this (not measured)\n")
    assert "a larger --memory-budget" in help_.partition("##")[0]


def test_every_candidate_that_ran_is_a_point_and_the_compared_ones_have_their_compared_figures() -> None:
    result = a_result()
    points = {point.role: point for point in figures(result).plane.points}
    assert points.keys() == {"recommended", "default", "other"}
    assert result.recommended is not None
    assert points["recommended"].tokens_per_second == result.recommended.tokens_per_second
    assert points["recommended"].peak_bytes == result.recommended.device_bytes == 23 * GIB


def test_a_point_without_a_figure_of_the_device_has_what_is_reserved() -> None:
    result = a_result()
    assert result.recommended is not None
    found = figures(replace(result, recommended=replace(result.recommended, device_bytes=None))).plane.points
    assert {point.role: point.peak_bytes for point in found}["recommended"] == 22 * GIB


def test_the_page_says_of_a_default_that_fits_why_it_is_not_recommended() -> None:
    shown = probe_report(only_the_default_fits())
    assert "TRL's default fits with 13.00 GiB" in verdict(only_the_default_fits()).headline
    (trials,) = shown.blocks(Candidates)
    assert "keeps 24.3 % of the dataset's tokens" in trials.rows[0].reason
    assert (trials.columns[0], trials.rows[0].cells[0]) == ("memory", "13.00 GiB")
    _, _, help_ = markdown(only_the_default_fits()).partition("## What might change this (not measured)\n")
    assert "--max-length 4096" in help_.partition("##")[0]


@pytest.mark.parametrize(
    ("sizes", "best"),
    [
        ([(1, 1.0), (2, 2.0), (3, 1.5)], [(1, 1.0), (2, 2.0)]),
        ([(2, 2.0), (1, 2.0)], [(1, 2.0)]),
        ([(1, 1.0), (1, 3.0)], [(1, 3.0)]),
        ([(1, 1.0), (1, 1.0)], [(1, 1.0)]),
        ([], []),
    ],
)
def test_on_the_front_nothing_needs_less_and_is_as_fast(
    sizes: list[tuple[int, float]], best: list[tuple[int, float]]
) -> None:
    plane = Plane(tuple(Point("", "", peak, rate, "other") for peak, rate in sizes), 3, (), "memory")
    assert [(point.peak_bytes, point.tokens_per_second) for point in plane.front] == best


def test_there_is_a_chart_only_of_what_there_are_figures_of() -> None:
    assert [chart.name for chart in charts(probe_report(a_result()))] == ["front"]
    assert [chart.name for chart in charts(probe_report(traced()))] == ["front", "step_recommended", "step_default"]
    assert charts(probe_report(nothing_fits())) == ()


def test_each_chart_says_what_it_shows() -> None:
    (front,) = charts(probe_report(a_result()))
    assert "the budget is 24.00 GiB" in front.caption
    (front, *_) = charts(probe_report(replace(a_result(), trials=(), baseline=None)))
    assert front.caption.startswith("1 candidate by memory used and speed; ")


def test_a_choice_that_may_have_contributed_nothing_has_a_grey_bar_and_says_so() -> None:
    result = a_result()
    first, *rest = result.contributions
    shown = probe_report(replace(result, contributions=(replace(first, significant=False), *rest)))
    (table,) = (table for table in shown.blocks(Table) if table.columns[0] == "choice")
    assert [row[2:] for row in table.rows[:3]] == [
        ("1.84x slower in one probe, within run-to-run variation; needs 3.00 GiB less", Bar(1.0, "other")),
        ("1.23x slower; needs 5.00 GiB less", Bar(1.23 / 1.84)),
        ("out of memory", Bar(None)),
    ]


def test_a_budget_in_mebibytes_is_drawn_in_mebibytes() -> None:
    result = a_result(
        recommended=None, baseline=a_choosable(0, a_result().trials[0].candidate, device_bytes=1 << 28), trials=()
    )
    (chart, *_) = charts(probe_report(result))
    assert chart.figure["layout"]["xaxis"]["title"]["text"] == "memory used (MiB)"
    assert chart.figure["data"][-1]["x"] == [256.0]


def test_the_arguments_of_the_search_close_the_page() -> None:
    settings = {"model": "a model", "effort": "quick", "plan": False, "allow": ["lora"], "fix": {"packing": "none"}}
    (facts,) = probe_report(a_result(settings=settings)).blocks(Facts)
    assert facts.pairs[-4:] == (
        ("effort", "quick"), ("plan", "false"), ("allow", "[lora]"), ("fix", "{packing: none}"),
    )  # fmt: skip
    assert dict(facts.pairs)["model"] != "a model"


def test_phases_that_were_timed_alone_are_shown() -> None:
    result = a_result()
    assert result.recommended is not None
    timed = replace(result, recommended=replace(result.recommended, seconds={"generation": 1.0, "micro-batch": 2.0}))
    assert "Phases of a step" in [section.title for section in probe_report(timed).sections]
