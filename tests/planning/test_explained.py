"""The stages of an explanation add up to the explained estimate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.core.documents.estimate import Estimate
from autotune.core.documents.explanation import Explanation, Subject
from autotune.core.files.codec import decode, encode
from autotune.core.rows.batch_geometry import Shape
from autotune.core.timeline import Occurrence
from autotune.planning.evaluator import explain
from autotune.planning.single import TracedPlan
from autotune.trainers.problem import TrainerProblem
from tests.planning.stand_in import ASSUMED, UNTRACEABLE, AnalyticTracer
from tests.planning.test_evaluator import problem_of, searched

WHOLE = problem_of({1024: 4, 700: 4})


class Planned:
    """An evaluator after a search, with what its estimates are explained from."""

    def __init__(self, directory: Path, problem: TrainerProblem = WHOLE) -> None:
        self.evaluator = searched(problem, AnalyticTracer(), directory)

    def explain(self, estimate: Estimate) -> Explanation:
        """Return how an estimate came about."""
        return explain(self.evaluator, estimate.candidate, Subject.FASTEST)

    @property
    def first(self) -> Estimate:
        """The best estimate."""
        return self.evaluator.ranked()[0]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    return Planned(tmp_path_factory.mktemp("cache"))


def test_tensors_at_the_peak_are_those_of_the_need(planned: Planned) -> None:
    estimate = planned.first
    peak = planned.explain(estimate).peak
    assert estimate.memory is not None
    assert peak is not None
    assert {name: estimate.memory.breakdown[name] for name in peak.categories} == peak.categories
    assert sum(estimate.memory.breakdown.values()) == estimate.memory.device_bytes


def test_the_peak_is_at_a_moment_of_the_traces(planned: Planned) -> None:
    traced = planned.evaluator.traced_plan(planned.first.candidate)
    peak = planned.explain(planned.first).peak
    assert isinstance(traced, TracedPlan)
    assert peak is not None
    for _, reply, _ in traced.fit.weighted():
        assert any(peak.moment in section.moments for section in reply.sections if section.part == peak.part)


def test_the_times_of_parts_are_those_of_the_step(planned: Planned) -> None:
    estimate = planned.first
    assert estimate.memory is not None
    together = sum(time.seconds * time.times for time in planned.explain(estimate).times)
    assert together == pytest.approx(estimate.memory.step_seconds)


def test_an_estimate_names_its_traces_with_weights_that_add_up_to_one(planned: Planned) -> None:
    found = planned.explain(planned.first)
    assert found.aligned
    assert sum(point.weight for point in found.traces) == pytest.approx(1.0)
    assert len({point.layers for point in found.traces}) == 2
    assert {point.shape for point in found.traces} == {found.geometry.worst}
    assert all(ASSUMED in point.assumptions for point in found.traces)


def test_the_batches_are_those_of_the_training_plan(planned: Planned) -> None:
    estimate = planned.first
    found = planned.explain(estimate)
    rows = found.training_plan.args["per_device_train_batch_size"]
    assert (found.documents, found.longest_tokens) == (8, 1024)
    assert found.geometry.worst in (Shape(int(str(rows)), 1024), Shape(1, found.geometry.worst.tokens))
    assert found.geometry.documents == pytest.approx(8, rel=0.1)
    further = [time.times for time in found.times if time.part.occurrence is Occurrence.FURTHER]
    assert further in ([], [found.geometry.micro_batches - 1])


def test_what_could_not_be_traced_has_a_plan_and_batches_and_no_figures(tmp_path: Path) -> None:
    fixed = problem_of(attention=UNTRACEABLE)
    planned = Planned(tmp_path, fixed)
    found = planned.explain(planned.first)
    assert found.training_plan.model["attn_implementation"] == UNTRACEABLE
    assert (found.traces, found.peaks, found.times, found.peak) == ((), (), (), None)


def test_it_survives_json(planned: Planned) -> None:
    found = planned.explain(planned.first)
    assert decode(Explanation, json.loads(json.dumps(encode(found)))) == found
