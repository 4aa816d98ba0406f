"""The sentences about a plan, before they are drawn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.documents.estimate import Change
from autotune.core.documents.length_report import LengthLimit
from autotune.reporting.document import Candidates, Plane, Table
from autotune.reporting.plan import (
    candidate_counts_text,
    change_text,
    choices_text,
    doubt_text,
    headline,
    plan_report,
    traces_text,
    unknown_lines,
    way_out_lines,
    workload_and_gpu_text,
)
from autotune.units import GIB
from tests.reporting.examples import BASELINE
from tests.reporting.plans import (
    AN_EPOCH,
    BUDGET_BYTES,
    DEFAULT,
    FASTEST,
    LONGEST,
    SECOND,
    UNKNOWN,
    a_plan,
    an_estimate,
)


def test_the_headline_names_rate_and_spare_of_the_fastest_that_fits() -> None:
    assert headline(a_plan()) == "The fastest that fits: 9,000 tok/s, with 4.00 GiB to spare"


def test_a_speed_that_depends_on_an_assumption_about_the_host_is_marked() -> None:
    assert FASTEST.memory is not None
    doubtful = replace(FASTEST, memory=replace(FASTEST.memory, time_error=0.5))
    plan = a_plan(estimates=(doubtful, SECOND), trainer="sft", epoch=AN_EPOCH, baseline_epoch=AN_EPOCH, price=2.0)
    assert headline(plan) == "The fastest that fits: ~9,000 tok/s, with 4.00 GiB to spare"
    (candidates,) = plan_report(plan).blocks(Candidates)
    assert [row.cells[-1] for row in candidates.rows[:2]] == ["~9,000", "8,000"]
    figures = {str(row[0]): str(row[1]) for table in plan_report(plan).blocks(Table) for row in table.rows}
    assert figures["speed"] == "~9,000 tok/s"
    assert figures["time per epoch"] == "~1 min 15 s"
    assert figures["cost per epoch"] == "~0.042"


def test_the_headline_says_how_much_each_of_several_gpus_trains() -> None:
    assert headline(a_plan(processes=4)) == (
        "The fastest that fits: 9,000 tok/s (2,250 per GPU), with 4.00 GiB to spare"
    )


def test_a_host_without_the_memory_is_said_beside_the_headline() -> None:
    assert FASTEST.memory is not None
    heavy = replace(FASTEST, memory=replace(FASTEST.memory, machine_bytes=128 * GIB))
    assert "up to 128 GiB are needed there, and the machine planned for has 96.00 GiB." in doubt_text(
        a_plan(estimates=(heavy,), host_bytes=96 * GIB)
    )
    assert doubt_text(a_plan(estimates=(heavy,), host_bytes=128 * GIB)) == ""
    assert doubt_text(a_plan(estimates=(heavy,))) == ""


def test_without_a_known_speed_nothing_is_said_of_time() -> None:
    roomy = an_estimate(LONGEST, 20 * GIB, None)
    assert headline(a_plan(estimates=(roomy, SECOND))) == (
        "The largest margin: 4.00 GiB to spare; no speed is predicted"
    )
    assert headline(a_plan(estimates=(roomy,))) == "It fits: 4.00 GiB to spare; no speed is predicted"
    assert plan_report(a_plan(estimates=(roomy, SECOND))).blocks(Plane)[0].legend[0] == (
        "recommended",
        "largest margin",
    )


def test_a_single_candidate_fits_or_does_not() -> None:
    assert headline(a_plan(estimates=(FASTEST,))) == "It fits: 9,000 tok/s, with 4.00 GiB to spare"
    assert headline(a_plan(estimates=(DEFAULT,))) == "It does not fit in 24.00 GiB: it needs 31.00 GiB."


def test_where_nothing_fits_the_least_that_is_needed_is_said() -> None:
    larger = an_estimate(LONGEST, 40 * GIB, 9000.0)
    found, needed = a_plan(estimates=(DEFAULT, larger, UNKNOWN)), "in 24.00 GiB: the least needs 31.00 GiB."
    assert headline(found) == f"Nothing is predicted to fit {needed}"
    limited = replace(found, settings={"timeout": "5m"})
    assert headline(limited) == f"Nothing that was traced is predicted to fit {needed}"


def test_where_nothing_is_known_a_probe_is_named_and_no_figure_invented() -> None:
    said = headline(a_plan(estimates=(UNKNOWN,), baseline=UNKNOWN))
    assert "autotune probe" in said
    assert "GiB" not in said


def test_room_within_the_error_is_doubted_and_the_fastest_beyond_doubt_is_named() -> None:
    tight = an_estimate(BASELINE.but(packing="bfd"), 23 * GIB, 9500.0)
    assert tight.memory is not None
    tight = replace(tight, memory=replace(tight.memory, error=0.35))
    said = doubt_text(a_plan(estimates=(tight, FASTEST, SECOND)))
    assert "(±35 %, 8.05 GiB)" in said
    assert "9,000 tok/s, 4.00 GiB to spare: gradient_checkpointing=selective" in said


def test_room_that_varied_lengths_may_take_is_doubted_too() -> None:
    roomy = an_estimate(LONGEST, 20 * GIB, 9500.0)
    assert roomy.memory is not None
    assert doubt_text(a_plan(estimates=(roomy,))) == ""
    varied = replace(roomy, memory=replace(roomy.memory, varied_bytes=3 * GIB))
    said = doubt_text(a_plan(estimates=(varied,)))
    # 4 GiB are above the error alone, and below both together.
    both = "the stated error (±10 %, 2.00 GiB) and what batches of varied lengths may add (3.00 GiB)"
    assert f"The margin is below {both}: it may not fit." in said


def test_where_all_room_is_within_the_error_that_is_said() -> None:
    tight = an_estimate(LONGEST, 23 * GIB, 9500.0)
    assert doubt_text(a_plan(estimates=(tight,))).endswith("Nothing fits with its error to spare.")


def test_a_change_names_only_what_is_changed() -> None:
    assert change_text(Change(BASELINE, SECOND)) == "fits with lora=r16 packing=bfd, 3.00 GiB to spare"


def test_candidates_are_counted_by_whether_they_fit() -> None:
    assert candidate_counts_text(a_plan(estimates=(FASTEST, DEFAULT, UNKNOWN))) == (
        "3 candidates: 1 fitting, 1 not fitting, 1 unknown."
    )
    assert candidate_counts_text(a_plan(estimates=(FASTEST,))) == "1 candidate: 1 fitting."


def test_the_largest_error_of_what_is_shown_is_named() -> None:
    assert FASTEST.memory is not None
    exact = replace(FASTEST, memory=replace(FASTEST.memory, error=0.0))
    traces = "14 traces (5 new) in 12 s"
    assert traces_text(a_plan(), [exact, UNKNOWN, DEFAULT]) == f"{traces}; memory may be off by 10 %"
    assert traces_text(a_plan(), [exact]) == traces_text(a_plan()) == traces
    wide = replace(FASTEST, memory=replace(FASTEST.memory, error=1.63))
    assert traces_text(a_plan(), [wide]) == f"{traces}; memory may be off by 163 %"


def test_unknown_candidates_are_counted_by_reason() -> None:
    other = replace(UNKNOWN, candidate=BASELINE.but(attention="eager"))
    third = replace(UNKNOWN, reason="never traced")
    assert unknown_lines(a_plan(estimates=(third, UNKNOWN, other))) == (
        "2 unknown: strange_attention gives no shape",
        "1 unknown: never traced",
    )


def test_the_target_says_which_part_of_a_gpu_may_be_used() -> None:
    assert workload_and_gpu_text(a_plan()).endswith("planned for RTX4090, which has 24.00 GiB")
    assert workload_and_gpu_text(a_plan(budget_bytes=BUDGET_BYTES // 2)).endswith("planned for 12.00 GiB of RTX4090")


@pytest.mark.parametrize(("fixed", "said"), [({}, "TRL's default"), ({"lora": "none"}, "TRL's default otherwise")])
def test_what_was_fixed_is_told_from_what_is_the_default(fixed: dict[str, str], said: str) -> None:
    plan = a_plan(settings={"fix": fixed})
    assert choices_text(BASELINE, plan) == said
    assert choices_text(BASELINE.but(lora="r16"), plan) == "lora=r16"
    assert ("with lora=none" in workload_and_gpu_text(plan)) == bool(fixed)


def test_ways_out_name_lengths_only_where_one_limits_rows_and_a_budget_only_below_the_device() -> None:
    assert way_out_lines(a_plan())[1:] == ("a device with more memory",)
    limited = a_plan(limit=LengthLimit(1024, 0.9, 10, 2_000), budget_bytes=BUDGET_BYTES // 2)
    assert way_out_lines(limited)[1:] == ("a --max-length below 1,024", "a larger --memory-budget")


def test_ways_out_name_what_was_not_allowed() -> None:
    assert way_out_lines(a_plan())[0] == "--allow quantization would add 8bit, 4bit-nf4 (rounds the frozen weights)"


def test_there_is_no_way_out_of_an_error() -> None:
    assert way_out_lines(a_plan(estimates=(UNKNOWN,))) == ()
