"""Figures of combinations that were not traced, out of those that were; and which to trace for that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.batch_geometry import Layout
from autotune.core.candidate import Candidate
from autotune.core.program import MICRO_BATCH, OPTIMIZER_STEP
from autotune.core.step_time import StepTime
from autotune.core.timeline import Occurrence, Part
from autotune.planning.additive.group import Group
from autotune.planning.additive.model import AdditiveModel
from autotune.planning.extrapolation.forecast import Forecast
from autotune.planning.extrapolation.mixing import Table, mixed, mixed_rows

STEP = (Part(MICRO_BATCH, Occurrence.FIRST), False)
UPDATE = (Part(OPTIMIZER_STEP, Occurrence.ONCE), False)


def group(kind: Layout = Layout.EQUAL, **choices: str) -> Group:
    return Group(Candidate({"liger": "off", "optimizer": "fused", "checkpointing": "on", **choices}), kind)


def forecast(step_bytes: int, update_bytes: int) -> Forecast:
    stretches = {STEP: {"activation": step_bytes}, UPDATE: {"temporary": update_bytes}}
    return Forecast(stretches, 0.0, 0, 0, 0, 0, {})


def seconds(whole: float) -> StepTime:
    return StepTime(whole, 0.0, 0.0, 0.0, 0.0, 0.0, 0)


def weights(composition: AdditiveModel, wanted: Group) -> dict[Group, float]:
    found = composition.sum(wanted)
    assert found is not None
    return {term.group: term.weight for term in found.terms}


def test_what_two_choices_change_is_added_to_what_neither_has() -> None:
    base, liger, loop = group(), group(liger="on"), group(optimizer="loop")
    composition = AdditiveModel([base, liger, loop])
    assert weights(composition, group(liger="on", optimizer="loop")) == {liger: 1, loop: 1, base: -1}


def test_a_choice_that_was_never_traced_is_not_composed() -> None:
    assert AdditiveModel([group(), group(liger="on")]).sum(group(optimizer="loop")) is None
    assert AdditiveModel([]).sum(group()) is None


def test_what_a_choice_changes_is_also_known_by_way_of_a_third() -> None:
    base, loop = group(), group(optimizer="loop")
    other, single = group(checkpointing="off"), group(checkpointing="off", optimizer="single")
    nearest = group(checkpointing="off", liger="on", optimizer="single")
    composition = AdditiveModel([base, loop, other, single, nearest], interacting={("liger", "on")})

    found = weights(composition, group(checkpointing="off", liger="on", optimizer="loop"))

    assert found == {nearest: 1, loop: 1, base: -1, other: 1, single: -1}


def test_rows_that_lie_alike_show_best_what_a_choice_changes() -> None:
    flat, flat_liger = group(Layout.FLAT), group(Layout.FLAT, liger="on")
    known = [group(), group(liger="on"), group(optimizer="loop"), flat, flat_liger]
    wanted = group(Layout.FLAT, liger="on", optimizer="loop")
    assert weights(AdditiveModel(known), wanted) == {flat_liger: 1, known[2]: 1, known[0]: -1}


def test_choices_count_as_unseen_together_where_they_may_not_add_up() -> None:
    base, liger, loop = group(), group(liger="on"), group(optimizer="loop")
    off = group(checkpointing="off")
    telling = {("liger", "on"), ("checkpointing", "off")}
    composition = AdditiveModel([base, liger, loop, off], telling)
    unseen = {
        wanted: found.unseen
        for wanted in (group(liger="on", optimizer="loop"), group(liger="on", checkpointing="off"))
        if (found := composition.sum(wanted)) is not None
    }
    assert list(unseen.values()) == [0, 1]


def test_each_stretch_of_a_step_is_added_up_by_itself() -> None:
    base, liger, loop = forecast(100, 60), forecast(80, 60), forecast(100, 150)
    both = mixed([(liger, 1.0), (loop, 1.0), (base, -1.0)])
    assert both.stretches == {STEP: {"activation": 80}, UPDATE: {"temporary": 150}}
    # Added up as peaks, it would have been 100 less 20 more 50.
    assert both.peak_bytes == 150


def test_what_would_be_less_than_nothing_is_nothing() -> None:
    little = mixed([(forecast(10, 5), 1.0), (forecast(20, 0), -1.0)])
    assert little.stretches[STEP] == {}
    assert little.peak_bytes == pytest.approx(5)


def test_many_micro_batches_are_added_up_like_each_by_itself() -> None:
    known = [[forecast(100, 60), forecast(10, 0)], [forecast(80, 0), forecast(20, 5)], [forecast(0, 8), forecast(5, 5)]]
    weights = (1.0, 1.5, -0.5)
    together = mixed_rows([(Table(rows), weight) for rows, weight in zip(known, weights, strict=True)])
    one_by_one = [mixed(list(zip(row, weights, strict=True))) for row in zip(*known, strict=True)]
    assert together == one_by_one
    assert together[0].stretches == {STEP: {"activation": 220}, UPDATE: {"temporary": 56}}


def test_the_time_of_a_part_that_one_micro_batch_lacks_is_not_added_up() -> None:
    further = Part(MICRO_BATCH, Occurrence.FURTHER)
    first, several = STEP[0], {STEP[0]: seconds(2.0), further: seconds(1.0)}
    one, two = forecast(1, 1), replace(forecast(1, 1), times=several)
    one = replace(one, times={first: seconds(4.0)})
    found = mixed_rows([(Table([one, two]), 1.0), (Table([one, two]), 0.5)])
    assert [list(each.times) for each in found] == [[first], [first, further]]
    assert found[1].times[further].seconds == pytest.approx(1.5)
