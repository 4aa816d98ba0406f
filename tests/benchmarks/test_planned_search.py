"""Recorded tables match the current search spaces, and searches can be replayed from them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from autotune.core.effort import EFFORTS
from autotune.core.files.codec import encode
from autotune.core.measurement import Measurement
from autotune.core.status import ProbeStatus
from autotune.planning.predictor import PlannedPredictor
from autotune.study.judge import Failures
from autotune.study.problem import Purpose, Record
from benchmarks.replay.distorted_search import DRAWN, MEASURED, distorted
from benchmarks.replay.planned_search import RecordedEstimates, best_rate, page, replay
from benchmarks.replay.rivals import SEARCHES
from benchmarks.replay.tables import RECORDED, Table, read_table, recordable
from benchmarks.replay.traced_search import RULES, searched


@pytest.fixture(scope="module", params=MEASURED)
def table(request: pytest.FixtureRequest) -> Table:
    return read_table(RECORDED / request.param)


def test_every_legal_candidate_was_recorded(table: Table) -> None:
    assert set(recordable(table.problem())) == {row.candidate for row in table.rows}


def test_every_candidate_was_estimated(table: Table) -> None:
    assert all(row.traced is not None for row in table.rows)


def test_nothing_that_is_vetoed_fits_in_the_recording(table: Table) -> None:
    estimates = RecordedEstimates(table)
    predictor = PlannedPredictor(estimates, lambda _: None)  # type: ignore[arg-type]
    for row in table.rows:
        prediction = predictor.trace(row.candidate)
        if prediction is not None and prediction.over(table.limit_bytes):
            assert not any(shown.ok for shown in row.measurements), row.candidate


def test_no_failure_vetoes_a_larger_batch_that_needs_less_since_it_does_not_accumulate() -> None:
    table = read_table(RECORDED / "8b_full.json.gz")
    failures, fitting, vetoed = Failures(table.problem()), [], 0
    for number, row in enumerate(table.rows):
        assert row.traced is not None
        if row.traced.may_fit:
            fitting.append(row.candidate)
        else:
            vetoed += failures.implied(row.candidate) is not None
            shown = Measurement(ProbeStatus.OUT_OF_MEMORY)
            failures.learn(Record(number, row.candidate, Purpose.SEARCH, shown), expected_to_fit=False)
    assert vetoed
    assert [failures.implied(candidate) for candidate in fitting] == [None] * len(fitting)


def test_a_replayed_search_ends_and_is_put_into_a_row(table: Table) -> None:
    effort = replace(EFFORTS["quick"], trials=6)
    pair = (replay(table, effort, 0, None, predicted=False), replay(table, effort, 0, None, predicted=True))
    assert all(0 < run.share <= 1 and 1 < run.total <= 6 for run in pair)
    assert sum(line.startswith("| 0 |") for line in page([pair]).splitlines()) == 1
    assert best_rate(table) > 0


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_of_a_search_by_traces_can_be_left_out(rule: str) -> None:
    with RULES[rule]():
        share, traces = searched(read_table(RECORDED / "dpo.json.gz"), 1.0, 0)
    assert 0 < share <= 1
    assert traces > 1


def test_drawn_measurements_can_be_stored_in_a_study() -> None:
    drawn, _ = distorted(read_table(RECORDED / DRAWN[0]), seed=0)
    assert all(encode(row.measurement) for row in drawn.rows)


@pytest.mark.parametrize("name", SEARCHES)
def test_every_search_begins_with_the_default_and_probes_what_was_recorded_once(name: str) -> None:
    if "Gaussian" in name:
        pytest.importorskip("scipy", reason="Optuna's Gaussian processes need scipy")
    table = read_table(RECORDED / "long.json.gz")
    probed = list(islice(SEARCHES[name](table, 0), 8))
    assert probed[0] == table.problem().baseline
    assert len(set(probed)) == len(probed) == 8
    assert set(probed) <= {row.candidate for row in table.rows}
