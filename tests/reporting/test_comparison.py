"""The figures of the comparison with the baseline, before anything is drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune.core.documents.result import Contribution, MeasuredCandidate, Result
from autotune.core.status import ProbeStatus, RunStatus
from autotune.reporting.comparison import (
    comparison_of_search,
    contribution_text,
    headline,
    runs_text,
    step_change_text,
)
from autotune.reporting.document import Bar
from autotune.units import GIB
from tests.reporting.examples import BASELINE, a_choosable, a_result, nothing_fits


def recommended(result: Result) -> MeasuredCandidate:
    """Return the recommendation."""
    assert result.recommended is not None
    return result.recommended


def from_one_run_each(speedup: float) -> Result:
    """Return a result whose speed-up is that of two probes."""
    alone: Any = {"tokens_per_second_low": None, "tokens_per_second_high": None, "runs": 1}
    default = a_choosable(0, BASELINE, tokens_per_second=10_000.0, **alone)
    fastest = replace(recommended(a_result()), tokens_per_second=speedup * 10_000.0, **alone)
    return a_result(
        recommended=fastest, baseline=default, speedup=speedup, speedup_low=None, speedup_high=None, pairs=0
    )


def cells(result: Result) -> dict[str, tuple[str, str]]:
    """Return both columns by label."""
    rows = comparison_of_search(result, recommended(result))
    return {f"{label}".strip(): (f"{ours}", f"{theirs}") for label, ours, _, theirs, _ in rows}


def contribution(
    speedup: float | None, saved: int | None, status: ProbeStatus = ProbeStatus.OK, reason: str = ""
) -> str:
    """Return the text on a contribution of packing."""
    return contribution_text(Contribution("packing", "bfd", "none", 3, status, reason, speedup, saved))


def test_each_figure_stands_beside_the_baselines() -> None:
    shown = cells(a_result())
    assert shown["memory used"] == ("23.00 GiB", "14.00 GiB")
    assert shown["reserved"] == ("22.00 GiB", "13.00 GiB")
    assert shown["allocated"] == ("21.00 GiB", "12.00 GiB")
    assert shown["speed"] == ("23,000 tok/s", "10,000 tok/s")
    assert shown["95 % range"] == ("21,400 to 24,720", "9,500 to 10,530")
    assert shown["time per epoch"] == ("7.4 s", "17 s")
    assert shown["tokens covered"] == ("99.50 %", "99.10 %")
    assert shown["max_length"] == ("2,048", "1,024")
    assert shown["batch x accumulation"] == ("4 x 2", "8 x 1")
    assert shown["documents per step"] == ("52.4", "8")
    assert shown["steps per epoch"] == ("14", "88")


def test_the_times_of_an_epoch_have_one_unit() -> None:
    result = a_result()
    assert result.baseline is not None
    slow = replace(result, baseline=replace(result.baseline, seconds_per_epoch=219))
    assert cells(slow)["time per epoch"] == ("7.4 s", "219 s")


@pytest.mark.parametrize(
    ("trainer", "counted"), [("sft", "documents"), ("grpo", "completions"), ("online_dpo", "prompts")]
)
def test_a_step_counts_what_its_trainer_makes_batches_of(trainer: str, counted: str) -> None:
    result = a_result()
    shown = cells(replace(result, trainer=trainer))
    assert shown[f"{counted} per step"] == ("52.4", "8")


def test_memory_is_drawn_against_the_budget_and_speed_against_the_faster() -> None:
    result = a_result()
    rows = comparison_of_search(result, recommended(result))
    shares = {label: (ours, theirs) for label, _, ours, _, theirs in rows}
    # On a GPU, the budget has to hold the context and what is reserved too.
    assert shares["memory used"] == (Bar(23 / 24), Bar(14 / 24, "default"))
    assert shares["  allocated"] == (Bar(None), Bar(None, "default"))
    assert shares["speed"] == (Bar(1.0), Bar(10_000.0 / 23_000.0, "default"))


def test_what_neither_has_measured_is_left_out() -> None:
    result = a_result()
    on_cpu = replace(
        result,
        recommended=replace(recommended(result), reserved_bytes=None, device_bytes=None),
        baseline=a_choosable(0, BASELINE, reserved_bytes=None, device_bytes=None),
    )
    assert cells(on_cpu)["memory used"] == ("21.00 GiB", "12.00 GiB")
    assert {"reserved", "allocated"}.isdisjoint(cells(on_cpu))


def test_a_baseline_that_did_not_run_shows_its_status_and_no_figures() -> None:
    result = replace(a_result(), baseline=nothing_fits().baseline, speedup=None)
    assert cells(result)["status"] == ("ok", "out of memory")
    assert cells(result)["speed"] == ("23,000 tok/s", "-")
    assert headline(result, recommended(result)) == "TRL's default ran out of memory; this runs at 23,000 tok/s."
    assert result.baseline is not None
    slow = replace(result, baseline=replace(result.baseline, status=ProbeStatus.TIMEOUT))
    assert headline(slow, recommended(slow)).startswith("TRL's default exceeded its time limit; this runs at")


def test_a_baseline_that_was_never_probed_shows_dashes() -> None:
    result = a_result(baseline=None, speedup=None)
    assert cells(result)["memory used"] == ("23.00 GiB", "-")


def test_rows_that_are_not_cut_have_no_maximum_length() -> None:
    result = a_result(recommended=replace(recommended(a_result()), max_length=None))
    assert cells(result)["max_length"] == ("none", "1,024")


def test_the_headline_gives_the_speed_up_at_the_same_global_batch() -> None:
    assert (
        headline(a_result(), recommended(a_result()))
        == "2.30x (95 % CI 2.11 to 2.51) the speed of TRL's default at the same global batch of 8."
    )


def test_the_spread_of_a_speed_up_without_an_interval_is_not_known() -> None:
    result = a_result(speedup_low=None, speedup_high=None, pairs=1)
    faster = "2.30x the speed of TRL's default at the same global batch of 8, by"
    assert headline(result, recommended(result)) == f"{faster} too few pairs of runs for a 95 % interval."
    once = from_one_run_each(2.3)
    assert headline(once, recommended(once)) == f"{faster} one run each: the spread is not known."


@pytest.mark.parametrize(("speedup", "apart"), [(0.93, False), (1.0, False), (1.04, False), (1.08, False), (1.1, True)])
def test_two_probes_do_not_tell_apart_what_runs_at_different_times_differ_by(speedup: float, apart: bool) -> None:
    once = from_one_run_each(speedup)
    same = f"As fast as TRL's default at the same global batch of 8 within run-to-run variation: {speedup:.2f}x."
    assert (headline(once, recommended(once)) != same) is apart


def test_the_headline_says_how_many_were_compared_and_what_limited_it() -> None:
    result = a_result(
        speedup_low=None,
        speedup_high=None,
        compared="the fastest of 9 compared candidates out of 288; the limit of probes ended the search",
    )
    among = "It is the fastest of 9 compared candidates out of 288; the limit of probes ended the search."
    assert headline(result, recommended(result)) == (
        "2.30x the speed of TRL's default at the same global batch of 8, by too few pairs of runs for a 95 % "
        f"interval. {among}"
    )
    alone = replace(result, baseline=None, speedup=None)
    assert headline(alone, recommended(alone)) == f"This runs at 23,000 tok/s. {among}"


def test_the_headline_admits_that_the_default_may_be_as_fast() -> None:
    result = a_result(speedup=1.02, speedup_low=0.95, speedup_high=1.1)
    assert headline(result, recommended(result)) == (
        "As fast as TRL's default at the same global batch of 8 within run-to-run variation: 1.02x (95 % CI 0.95 to "
        "1.10)."
    )


def test_runs_that_differ_too_much_tell_no_range_of_a_further_one() -> None:
    result = a_result()
    wide = replace(recommended(result), tokens_per_second_low=27.0, tokens_per_second_high=73_476.0)
    assert cells(replace(result, recommended=wide))["95 % range"][0] == "not known"


def test_the_headline_admits_that_runs_that_differ_too_much_tell_no_speed_up() -> None:
    result = a_result(speedup=1.5, speedup_low=0.003, speedup_high=851.62, pairs=2)
    assert headline(result, recommended(result)) == (
        "The speed-up over TRL's default at the same global batch of 8 is not known: 2 pairs of runs differ too much."
    )


def test_the_headline_of_a_default_that_is_faster_and_may_not_be_recommended_gives_the_lower_speed() -> None:
    slower = a_result(speedup=0.8, speedup_low=0.7, speedup_high=0.9)
    assert headline(slower, recommended(slower)).startswith("0.80x (95 % CI 0.70 to 0.90) the speed of TRL's default")


def test_runs_are_counted_and_their_range_is_explained() -> None:
    assert runs_text(a_result(), recommended(a_result())) == (
        "The speed is the mean of 6 runs, 5 of them alternating with TRL's default. Its 95 % range is for a single "
        "later run."
    )
    alone = a_result(pairs=0)
    assert "the mean of 6 runs. Its 95 % range" in runs_text(alone, recommended(alone))


def test_one_run_is_said_to_show_no_spread() -> None:
    once = a_choosable(8, BASELINE, tokens_per_second_low=None, tokens_per_second_high=None, runs=1)
    assert runs_text(a_result(), once) == ("The speed is that of one run, so the spread between runs is not known.")


def test_the_headline_admits_that_the_default_is_already_the_fastest() -> None:
    result = a_result(recommended=a_choosable(0, BASELINE), speedup=1.0)
    assert headline(result, recommended(result)) == "TRL's default is already the fastest candidate that fits."
    few = replace(result, compared="the only compared candidate out of 288; the time limit ended the search")
    assert headline(few, recommended(few)) == (
        "TRL's default is the only compared candidate out of 288; the time limit ended the search."
    )
    stopped = replace(result, status=RunStatus.INTERRUPTED)
    assert headline(stopped, recommended(stopped)) == "Nothing faster than TRL's default was found so far."


@pytest.mark.parametrize(
    ("speedup", "saved", "said"),
    [
        (1.23, 2 * GIB // 5, "1.23x slower; needs 410 MiB more"),
        (0.8, -3 * GIB, "1.25x faster; needs 3.00 GiB less"),
        (1.002, None, "equally fast"),
        (2.0, 0, "2.00x slower"),
    ],
)
def test_a_contribution_says_what_changing_back_did(speedup: float, saved: int | None, said: str) -> None:
    assert contribution(speedup, saved) == said


def test_a_contribution_within_the_spread_between_runs_is_not_told_apart() -> None:
    near = Contribution("packing", "bfd", "none", 3, ProbeStatus.OK, "", 1.23, GIB, significant=False)
    assert contribution_text(near) == "1.23x slower in one probe, within run-to-run variation; needs 1.00 GiB more"
    assert contribution_text(replace(near, significant=True)) == "1.23x slower; needs 1.00 GiB more"
    assert contribution_text(replace(near, speedup=1.001)) == "equally fast; needs 1.00 GiB more"


def test_a_contribution_that_did_not_fit_says_so() -> None:
    assert contribution(None, None, ProbeStatus.OUT_OF_MEMORY) == "out of memory"


def test_a_contribution_that_was_not_measured_says_why() -> None:
    assert contribution(None, None, ProbeStatus.VETOED, "it is illegal") == "not measured: it is illegal"


def test_more_documents_in_a_step_are_pointed_out() -> None:
    said = step_change_text(a_result())
    assert "An optimizer step has 52.4 documents instead of 8, and an epoch 14 steps instead of 88" in said
    assert "learning rate" in said
    assert "has 52.4 prompts instead" in step_change_text(replace(a_result(), trainer="online_dpo"))
    single = a_result(recommended=replace(recommended(a_result()), documents_per_step=1.0, steps_per_epoch=1))
    assert "has 1 document instead of 8, and an epoch 1 step instead of 88" in step_change_text(single)


def test_the_same_number_of_documents_in_a_step_is_not() -> None:
    same = replace(recommended(a_result()), documents_per_step=8.0)
    assert step_change_text(a_result(recommended=same)) == ""
