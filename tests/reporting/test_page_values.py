"""What a report shows, as values, before anything is drawn or written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.documents import Documents
from autotune.core.length_report import LengthBin
from autotune.core.length_report import histogram as bins_of
from autotune.core.lengths import LengthDistribution
from autotune.core.result import Result
from autotune.core.status import RunStatus
from autotune.reporting.document import Candidates, Charts, Paragraph, Plane, Point, Snippet, Table, Tone, Verdict
from autotune.reporting.page import markdown
from autotune.reporting.page.charts import charts
from autotune.reporting.probe import probe_report
from autotune.reporting.sections import histogram
from autotune.units import GIB
from tests.reporting.examples import COUNTS, a_choosable, a_result, nothing_fits, only_the_default_fits


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


@pytest.mark.parametrize(("confirmed", "said"), [(True, "so far, confirmed by"), (False, "so far, not confirmed by")])
def test_the_page_of_an_interrupted_search_says_so_first(confirmed: bool, said: str) -> None:
    stopped = a_result(status=RunStatus.INTERRUPTED, confirmed=confirmed)
    text = f"Interrupted: this is the best {said} a longer run."
    assert verdict(stopped).remarks[0] == Paragraph(text, Tone.UNSURE)
    short = Paragraph("Not confirmed by a longer run.", Tone.UNSURE)
    assert verdict(a_result(confirmed=False)).remarks[0] == short
    ended = Paragraph("Confirmed by a longer run, the worst batch included.", Tone.GOOD)
    assert verdict(a_result()).remarks[0] == ended


def test_where_nothing_fits_there_is_no_command_and_what_might_help_is_told() -> None:
    shown = verdict(nothing_fits())
    assert shown.tone is Tone.BAD
    assert shown.command == ""
    assert probe_report(nothing_fits()).blocks(Table) == []
    _, _, help_ = markdown(nothing_fits()).partition("## What might change this (not measured)\n")
    assert "a larger --memory-budget" in help_.partition("##")[0]


def test_every_candidate_that_ran_is_a_point_and_the_compared_ones_have_their_compared_figures() -> None:
    result = a_result()
    points = {point.role: point for point in figures(result).plane.points}
    assert points.keys() == {"recommended", "default", "other"}
    assert result.recommended is not None
    assert points["recommended"].tokens_per_second == result.recommended.tokens_per_second
    assert points["recommended"].peak_bytes == result.recommended.peak_bytes == 21 * GIB


def test_the_page_says_of_a_default_that_fits_why_it_is_not_recommended() -> None:
    shown = probe_report(only_the_default_fits())
    assert "TRL's default fits with 10.00 GiB" in verdict(only_the_default_fits()).headline
    (trials,) = shown.blocks(Candidates)
    assert "keeps 24.3 % of the dataset's tokens" in trials.rows[0].reason
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


def bins() -> tuple[LengthBin, ...]:
    """Return the bins of the example's rows."""
    return bins_of(Documents.of_lengths(LengthDistribution(COUNTS)))


def test_the_histogram_has_the_bins_of_the_lengths_command() -> None:
    shown = figures(a_result()).lengths
    assert shown is not None
    assert shown.bins == bins()
    assert shown.longest == 2900
    (chart,) = (chart for chart in charts(probe_report(a_result())) if chart.name == "lengths")
    (bars,) = chart.figure["data"]
    assert bars["y"] == [part.rows for part in bins()]
    assert bars["text"][-1] == "2,049 to 2,900 tokens: 1 rows"


def test_the_cut_lies_where_its_length_is_among_the_bars() -> None:
    (chart,) = (chart for chart in charts(probe_report(a_result())) if chart.name == "lengths")
    (line,) = chart.figure["layout"]["shapes"]
    # 2,048 is the end of the last bar but one.
    assert line["x0"] == len(bins()) - 1.5


@pytest.mark.parametrize(("length", "cut"), [(1024, 1024), (2900, None), (5000, None), (None, None)])
def test_a_length_that_cuts_nothing_is_no_cut(length: int | None, cut: int | None) -> None:
    shown = histogram(bins(), length, "it")
    assert shown is not None
    assert shown.cut == cut
    assert histogram((), length, "it") is None


def test_predictions_stand_beside_what_was_measured_of_the_same_probe() -> None:
    result = a_result()
    trial = replace(result.trials[0], predicted_bytes=14 * GIB, predicted_tokens_per_second=9_000.0)
    shown = figures(replace(result, trials=(trial, *result.trials[1:])))
    assert [(item.predicted, item.measured) for item in shown.memory] == [(14 * GIB, trial.reserved_bytes)]
    assert [(item.predicted, item.measured) for item in shown.speed] == [(9_000.0, trial.tokens_per_second)]


def test_there_is_a_chart_only_of_what_there_are_figures_of() -> None:
    names = [chart.name for chart in charts(probe_report(a_result()))]
    assert names == ["front", "choices", "lengths"]
    result = a_result()
    assert result.recommended is not None
    phased = replace(result, recommended=replace(result.recommended, peaks={"generation": GIB, "micro-batch": 2 * GIB}))
    assert "phases" in [chart.name for chart in charts(probe_report(phased))]
    assert [chart.name for chart in charts(probe_report(nothing_fits()))] == ["lengths"]


def test_each_chart_says_what_it_shows() -> None:
    told = {chart.name: chart.caption for chart in charts(probe_report(a_result()))}
    assert "the budget is 24.00 GiB" in told["front"]
    assert "700 rows of up to 2,900 tokens; the recommendation cuts at 2,048." in told["lengths"]


def test_a_choice_that_may_have_contributed_nothing_is_grey_and_said() -> None:
    result = a_result()
    first, *rest = result.contributions
    shown = probe_report(replace(result, contributions=(replace(first, told_apart=False), *rest)))
    (chart,) = (chart for chart in charts(shown) if chart.name == "choices")
    (bars,) = chart.figure["data"]
    colours = dict(zip(bars["y"], bars["marker"]["color"], strict=True))
    assert colours == {"packing=bfd": "var(--other)", "gradient_checkpointing=off": "var(--recommended)"}
    assert "packing=bfd 1.84x (may be chance), gradient_checkpointing=off 1.23x. Grey:" in chart.caption


def test_a_budget_in_mebibytes_is_drawn_in_mebibytes() -> None:
    result = a_result(
        recommended=None, baseline=a_choosable(0, a_result().trials[0].candidate, peak_bytes=1 << 28), trials=()
    )
    (chart, *_) = charts(probe_report(result))
    assert chart.figure["layout"]["xaxis"]["title"]["text"] == "peak memory (MiB)"
    assert chart.figure["data"][-1]["x"] == [256.0]


def test_the_command_that_searches_again_has_the_options_that_were_given() -> None:
    settings = {
        "model": "a model", "dataset": "rows.jsonl", "effort": "quick", "plan": False, "memory_budget": "8GiB",
        "allow": ["lora", "precision"], "fix": {"packing": "none", "max_length": 512},
    }  # fmt: skip
    (_, _, again) = probe_report(a_result(settings=settings)).blocks(Snippet)
    assert again.text == (
        "autotune probe 'a model' rows.jsonl --effort quick --no-plan --memory-budget 8GiB --allow lora,precision "
        "--fix packing=none --fix max_length=512"
    )


def test_phases_that_were_timed_alone_have_no_chart_of_memory() -> None:
    result = a_result()
    assert result.recommended is not None
    timed = replace(result, recommended=replace(result.recommended, seconds={"generation": 1.0, "micro-batch": 2.0}))
    assert "Phases of a step" in [section.title for section in probe_report(timed).sections]
    assert "phases" not in [chart.name for chart in charts(probe_report(timed))]
