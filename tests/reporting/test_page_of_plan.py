"""The page of a plan: a report's page with the plan's figures."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from autotune.core.documents.estimate import Estimate, Origin, Plan
from autotune.reporting.document import Candidates, Charts, Facts, Paragraph, Point, Table, Tone, Verdict
from autotune.reporting.page.charts import charts
from autotune.reporting.plan import choices_text, headline, plan_report
from tests.reporting.examples import a_timeline
from tests.reporting.pages import html, markdown
from tests.reporting.plans import AN_EPOCH, DEFAULT, FASTEST, LONGEST, SECOND, UNKNOWN, a_plan
from tests.reporting.test_page import HOSTILE, own


def planned(**changes: Any) -> Plan:
    """A plan of a trainer and rows, with the steps of both compared candidates."""
    known: dict[str, Any] = {
        "trainer": "sft",
        "environment": {"torch": "2.13.0", "trl": "1.16.0"},
        "timeline": a_timeline(), "baseline_timeline": a_timeline(micro_batches=8),
        "settings": {"model": "Qwen/Qwen2.5-7B", "gpu": "RTX4090", "seq_len": 1024},
    }  # fmt: skip
    return a_plan(**{**known, **changes})


def candidates(plan: Plan) -> Candidates:
    """Return the list of candidates of a page."""
    (found,) = plan_report(plan).blocks(Candidates)
    return found


def points(plan: Plan) -> tuple[Point, ...]:
    """Return the candidates that a page draws."""
    (found,) = plan_report(plan).blocks(Charts)
    return found.plane.points


def test_the_verdict_is_the_terminal_s_and_says_that_nothing_was_measured() -> None:
    shown = plan_report(planned())
    choices, unmeasured = choices_text(LONGEST, planned()), (Paragraph("Nothing was measured."),)
    assert shown.verdict == Verdict(headline(planned()), Tone.GOOD, choices, remarks=unmeasured)
    table, *_ = shown.blocks(Table)
    assert [row[1] for row in table.rows][:3] == ["20.00 GiB", "4.00 GiB", "10 %"]


def test_batches_steps_and_epoch_stand_beside_the_defaults_in_the_table() -> None:
    table, *_ = plan_report(planned(epoch=AN_EPOCH, baseline_epoch=replace(AN_EPOCH, row_coverage=0.97))).blocks(Table)
    shown = {str(row[0]): (row[1], row[3]) for row in table.rows}
    assert shown["rows covered"] == ("100.0 %", "97.0 %")
    assert shown["steps per epoch"] == ("88", "88")
    assert shown["time per epoch"] == ("1 min 15 s", "1 min 15 s")


def test_the_charts_are_those_of_a_report() -> None:
    names = [chart.name for chart in charts(plan_report(planned()))]
    assert names == ["front", "step_recommended", "step_default"]


def test_every_candidate_has_a_row_and_says_what_makes_it_fit() -> None:
    rows = candidates(planned()).rows
    assert [row.outcome for row in rows] == ["fits", "fits", "does not fit", "unknown"]
    assert rows[2].reason.startswith("fits with")
    assert rows[3].reason == UNKNOWN.reason
    assert [row.cells[-1] for row in rows] == ["9,000", "8,000", "7,000", "-"]


def test_what_was_traced_is_drawn_and_counted() -> None:
    assert [point.label for point in points(planned())] == ["traced"] * 3
    assert candidates(planned()).counts == "4 candidates: 2 fitting, 1 not fitting, 1 unknown."


def test_where_nothing_fits_the_page_is_about_what_needs_the_least() -> None:
    shown = plan_report(planned(estimates=(DEFAULT, UNKNOWN), timeline=a_timeline()))
    assert shown.verdict is not None
    assert shown.verdict.tone is Tone.BAD
    (figures,) = shown.blocks(Charts)
    assert [step.name for step in figures.steps] == ["least memory"]
    _, _, help_ = markdown(planned(estimates=(DEFAULT,))).partition("## What might change this (not predicted)\n")
    assert "a device with more memory" in help_.partition("##")[0]


def test_where_nothing_was_traced_nothing_is_drawn() -> None:
    shown = plan_report(planned(estimates=(UNKNOWN,), baseline=UNKNOWN, timeline=None, baseline_timeline=None))
    assert charts(shown) == ()
    text = markdown(planned(estimates=(UNKNOWN,), baseline=UNKNOWN))
    _, _, why = text.partition("## Why nothing is predicted\n")
    assert "1 unknown: strange\\_attention gives no shape" in why.partition("##")[0]
    assert "What might change this" not in text


def test_the_arguments_of_the_plan_close_the_page() -> None:
    *_, facts = plan_report(planned()).blocks(Facts)
    assert facts.pairs[-2:] == (("gpu", "RTX4090"), ("seq_len", "1024"))


def test_a_hostile_name_stays_a_name() -> None:
    hostile = Estimate(UNKNOWN.candidate, Origin.UNKNOWN, reason=HOSTILE)
    page = own(html(planned(
        model=HOSTILE, dataset=HOSTILE, notes=(HOSTILE,), estimates=(FASTEST, SECOND, hostile),
        settings={"model": HOSTILE}, environment={HOSTILE: HOSTILE}, gpu=replace(a_plan().gpu, name=HOSTILE),
    )))  # fmt: skip
    assert page.count("<script") == own(html(planned())).count("<script")
    assert "<img" not in page


def test_the_plan_as_markdown_has_the_front() -> None:
    assert re.search(r"\| 20\.00 GiB \| 9,000 tok/s \|", markdown(planned()))
