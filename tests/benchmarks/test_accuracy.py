"""The arithmetic of comparisons between predictions and measurements."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.candidate import Candidate
from autotune.core.machine import NULL_DRIVER, Hardware, Machine
from autotune.core.measurement import Measurement
from autotune.core.status import ProbeStatus
from autotune.units import GIB
from benchmarks.gpu.accuracy import (
    Outcome,
    Pair,
    Prediction,
    groups,
    pairs,
    rank_correlation,
    spearman,
    spread,
    verdict,
)
from benchmarks.gpu.accuracy_report import details, page, summary
from benchmarks.gpu.predicted import SCHEDULE
from benchmarks.gpu.record import Record
from benchmarks.gpu.trace_pool import NO_TIME

OK = Measurement(
    ProbeStatus.OK, peak_bytes=10 * GIB, reserved_bytes=12 * GIB, device_bytes=13 * GIB, step_seconds=2.0,
    tokens_per_second=500.0, worst_rows=4, worst_tokens=512,
)  # fmt: skip
OUT_OF_MEMORY = Measurement(ProbeStatus.OUT_OF_MEMORY, worst_rows=4, worst_tokens=512)
PREDICTED = Prediction(
    allocated_bytes=11 * GIB, reserved_bytes=12 * GIB, context_bytes=GIB // 2, host_bytes=0, error=0.1, fits=True,
    step_seconds=1.0, tokens_per_second=1000.0, rows=4, tokens=512,
)  # fmt: skip


def outcome(measured: Measurement | None = OK, predicted: Prediction = PREDICTED, **changes: Any) -> Outcome:
    known = Outcome("case", "scenario", "model", 20 * GIB, {"liger": "on"}, measured, {"traced": predicted})
    return replace(known, **changes)


def test_an_error_is_relative_to_what_was_measured_and_negative_for_an_underestimate() -> None:
    assert Pair(11, 10, 0.1).error == pytest.approx(0.1)
    assert Pair(9, 10, 0.1).error == pytest.approx(-0.1)


def test_an_underestimate_is_beyond_the_margin_where_more_was_measured_than_it_allows_for() -> None:
    assert not Pair(10, 11, 0.1).beyond_margin
    assert Pair(10, 11.1, 0.1).beyond_margin
    assert not Pair(20, 10, 0.1).beyond_margin


def test_times_with_measured_operators_are_compared_with_planned_ones_of_the_same_cases() -> None:
    exact, off = (replace(PREDICTED, step_seconds=seconds) for seconds in (2.0, 3.0))
    alone = outcome(predictions={"traced": exact, "planned": exact})
    both = outcome(predictions={"traced": exact, "planned": off, "measured operators": exact})
    devices = {"H100": [[alone] * 5, [alone, both]]}
    assert "half within 0.0%; 6 of 7 are within the stated 25%, on the worst of 2 machines 1 of 2." in summary(devices)
    text = details(devices)
    assert "In each of 1 groups" in text
    assert "For 1, operators were also timed" in text
    assert "step times computed from these are 0.0% off in the median, planned ones 50.0%." in text


def test_the_summary_has_how_far_plans_were_off_in_either_direction() -> None:
    low, high = (replace(PREDICTED, reserved_bytes=size * GIB, step_seconds=size / 6) for size in (9, 15))
    text = summary({"H100": [[outcome(predictions={"planned": one}) for one in (low, PREDICTED, high)]]})
    assert "reserved memory is between 25.0% too low and 25.0% too high" in text
    assert "2 of 3 are off by more than the stated 10%" in text
    assert "Step times are between 50.0% too short and 25.0% too long" in text


def test_a_spread_has_median_and_95th_percentile_of_sizes_and_the_worst_with_its_sign() -> None:
    found = spread([Pair(100 + error, 100, 0.02) for error in (*range(1, 20), -50)])
    assert found is not None
    assert found.count == 20
    assert found.median == pytest.approx(0.105)
    assert found.percentile_95 == pytest.approx(0.19)
    assert found.worst == pytest.approx(-0.5)
    assert found.beyond_margin == 1
    assert spread([]) is None


def test_only_what_ran_to_the_end_has_errors() -> None:
    known = [outcome(), outcome(OUT_OF_MEMORY), outcome(None), outcome(predictions={})]
    assert [pair.error for pair in pairs(known, "traced", "allocated")] == [pytest.approx(0.1)]
    assert [pair.error for pair in pairs(known, "traced", "reserved")] == [0]
    assert [pair.error for pair in pairs(known, "traced", "step time")] == [-0.5]


def test_what_a_cpu_has_not_is_left_out() -> None:
    on_cpu = outcome(replace(OK, reserved_bytes=None), replace(PREDICTED, reserved_bytes=None, step_seconds=None))
    assert pairs([on_cpu], "traced", "reserved") == []
    assert pairs([on_cpu], "traced", "step time") == []
    assert on_cpu.context_bytes is None


def test_the_context_is_what_the_driver_counts_beside_the_allocator() -> None:
    assert outcome().context_bytes == GIB


@pytest.mark.parametrize(
    ("changes", "flat", "same"),
    [
        ({}, False, True),
        ({"rows": 1}, False, False),
        ({"rows": 1}, True, True),
        ({"tokens": 511}, True, False),
        ({"tokens": None}, False, None),
    ],
)
def test_shapes_are_compared_by_rows_and_tokens_and_end_to_end_by_tokens(
    changes: dict[str, Any], flat: bool, same: bool | None
) -> None:
    assert outcome(predicted=replace(PREDICTED, **changes), flat=flat).same_shape("traced") is same


@pytest.mark.parametrize(
    ("measured", "fits", "reserved", "said"),
    [
        (OK, True, 12, "right"),
        (OUT_OF_MEMORY, False, 30, "right"),
        (OK, False, 20, "wrong, within its error"),
        (OK, False, 30, "wrong: it would have been vetoed"),
        (OUT_OF_MEMORY, True, 19, "wrong, within its error"),
        (OUT_OF_MEMORY, True, 12, "wrong: an underestimate beyond its error"),
        (Measurement(ProbeStatus.CRASHED), True, 12, None),
        (None, True, 12, None),
    ],
)
def test_a_wrong_verdict_weighs_by_whether_the_stated_error_covers_it(
    measured: Measurement | None, fits: bool, reserved: int, said: str | None
) -> None:
    predicted = replace(PREDICTED, fits=fits, reserved_bytes=reserved * GIB)
    assert verdict(outcome(measured, predicted), "traced") == said


def test_ranks_correlate_whatever_the_scale_and_ties_share_theirs() -> None:
    assert spearman([1, 2, 3, 4], [10, 100, 1000, 10000]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # By hand: ranks 0, 1.5, 1.5, 3 and 0, 1, 2, 3.
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486833)


def test_there_is_no_correlation_of_two_pairs_or_of_equal_values() -> None:
    assert spearman([1, 2], [1, 2]) is None
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert rank_correlation([outcome()], "traced") is None


def test_cases_are_grouped_by_model_and_by_the_knobs_that_vary() -> None:
    first, second = (outcome(choices={"liger": "on", "packing": packing}) for packing in ("none", "bfd"))
    assert groups([first, second, outcome(None, model="other", choices={})]).keys() == {
        "model",
        "other",
        "packing=none",
        "packing=bfd",
    }


def test_the_page_has_every_case_and_every_reason_and_counts_those_for_which_no_time_was_left() -> None:
    missing = outcome(None, name="another", predictions={}, reasons={"measured": "it cannot run"})
    late = replace(missing, name="a third", reasons={"measured": NO_TIME})
    text = page("Title", ["About."], [outcome(reasons={"planned": NO_TIME}), missing, late])
    assert "| case | ok | 10.00 [+10.0%] | 12.00 [+0.0%] | 1.00 [0.50] | 2.000 [-50.0%] |" in text
    assert "| another | not run |" in text
    assert "- another: measured: it cannot run" in text
    assert "a third" not in text
    assert "Of 3 cases, 1 were not planned, 1 were not measured: no time was left." in text
    assert "| traced | allocated | 1 | 10.00% | 10.00% | +10.00% | 0 |" in text


def test_a_group_of_the_page_has_three_cases_and_a_choice_that_others_lack() -> None:
    many = [outcome(choices={"liger": "on", "packing": packing}) for packing in ("none", "none", "none", "bfd")]
    text = page("Title", ["About."], [*many, outcome(None, choices={"liger": "off"})])
    assert re.findall(r"^\| (\S+=\S+) ", text, re.MULTILINE) == ["packing=none"]


def test_the_page_of_a_null_gpu_has_no_times(tmp_path: Path) -> None:
    hardware = Hardware("cuda", "NVIDIA H100", 80 * GIB, driver=NULL_DRIVER)
    record = Record(tmp_path / "found.json", Machine(hardware), SCHEDULE, [outcome()])
    record.described("case", Candidate({}), 80 * GIB, flat=False)
    text = (tmp_path / "found.md").read_text(encoding="utf-8")
    assert "| case | ok | 10.00 [+10.0%] | 12.00 [+0.0%] | 1.00 [0.50] |\n" in text
    assert "## Time" not in text
    assert "measured times mean nothing" in " ".join(text.split())
    assert json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["null_gpu"] is True
