"""An explanation's stages add up to the estimate that they explain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.core.batch_geometry import Shape
from autotune.core.codec import decode, encode
from autotune.core.estimate import Estimate, Origin
from autotune.core.explanation import Explanation, Subject
from autotune.core.timeline import Occurrence
from autotune.inspection.gpus import find_gpu
from autotune.planning.candidates import legal_candidates
from autotune.planning.explained import explained
from autotune.planning.planner import Planner
from autotune.planning.target import Accelerator
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.store import Traces
from autotune.space import Wishes
from autotune.trainers.problem import TrainerProblem
from autotune.units import GIB
from tests.planning.stand_in import ASSUMED, UNTRACEABLE, AnalyticTracer
from tests.settings import GPU, problem, setting, workload

LAYERS = 16
H100 = find_gpu("H100-80GB")
WHOLE = problem(setting(machine=GPU, of=workload(lengths={1024: 4, 700: 4})), Wishes({"max_length": 1024}))


class Planned:
    """A planner of the whole space, with what its estimates are explained from."""

    def __init__(self, directory: Path, problem: TrainerProblem = WHOLE) -> None:
        self.problem = problem
        self.traces = Traces(AnalyticTracer(), Cache(directory), "model", {})
        target = Accelerator(H100, 10 * GIB)
        self.planner = Planner(problem, target, self.traces, ("full",) * LAYERS, legal_candidates(problem))
        self.planner.explore(14)
        self.planner.refine(lambda ranked: ranked[:1], 4)

    def explain(self, estimate: Estimate) -> Explanation:
        """Return how an estimate came about."""
        basis = self.planner.figures.basis(estimate.candidate)
        return explained(self.problem, estimate.candidate, Subject.FASTEST, basis, self.traces, H100)

    def first(self, origin: Origin) -> Estimate:
        """Return the best estimate of an origin."""
        return next(estimate for estimate in self.planner.ranked() if estimate.origin is origin)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    return Planned(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("origin", [Origin.TRACED, Origin.EXTRAPOLATED, Origin.COMPOSED])
def test_tensors_and_additions_are_what_is_needed(planned: Planned, origin: Origin) -> None:
    estimate = planned.first(origin)
    found = planned.explain(estimate)
    assert estimate.memory is not None
    assert found.peak is not None
    added = found.additions
    allocated = found.peak.total_bytes + added.rounding_bytes + added.workspace_bytes
    assert allocated == estimate.memory.peak_bytes
    assert allocated + added.fragmentation_bytes + added.context_bytes == estimate.memory.device_bytes
    assert {name: estimate.memory.breakdown[name] for name in found.peak.categories} == found.peak.categories


@pytest.mark.parametrize("origin", [Origin.TRACED, Origin.EXTRAPOLATED, Origin.COMPOSED])
def test_the_times_of_parts_are_those_of_the_step(planned: Planned, origin: Origin) -> None:
    estimate = planned.first(origin)
    assert estimate.memory is not None
    together = sum(time.seconds * time.times for time in planned.explain(estimate).times)
    assert together == pytest.approx(estimate.memory.step_seconds)


def test_a_traced_estimate_has_one_group_whose_points_have_weights_that_add_up_to_one(planned: Planned) -> None:
    (group,) = planned.explain(planned.first(Origin.TRACED)).groups
    assert group.weight == 1.0
    assert sum(point.weight for point in group.points) == pytest.approx(1.0)
    assert len({point.layers for point in group.points}) == 2
    assert all(ASSUMED in point.assumptions for point in group.points)


def test_a_composed_estimate_names_its_groups_with_weights_that_add_up_to_one(planned: Planned) -> None:
    groups = planned.explain(planned.first(Origin.COMPOSED)).groups
    assert len(groups) > 1
    assert sum(group.weight for group in groups) == pytest.approx(1.0)


def test_the_batches_are_those_of_the_training_plan(planned: Planned) -> None:
    estimate = planned.first(Origin.TRACED)
    found = planned.explain(estimate)
    rows = found.training_plan.args["per_device_train_batch_size"]
    assert (found.documents, found.longest_tokens) == (8, 1024)
    assert found.geometry.worst in (Shape(int(str(rows)), 1024), Shape(1, found.geometry.worst.tokens))
    assert found.geometry.documents == pytest.approx(8, rel=0.1)
    further = [time.times for time in found.times if time.part.occurrence is Occurrence.FURTHER]
    assert further in ([], [found.geometry.micro_batches - 1])


def test_what_was_traced_before_is_told_from_what_is_traced_now(planned: Planned, tmp_path: Path) -> None:
    first = Planned(tmp_path)
    again = Planned(tmp_path)
    new = [[point.new for point in one.explain(one.first(Origin.TRACED)).groups[0].points] for one in (first, again)]
    assert all(new[0])
    assert not any(new[1])


def test_what_could_not_be_traced_has_a_plan_and_batches_and_no_figures(tmp_path: Path) -> None:
    fixed = problem(WHOLE.setting, Wishes({"max_length": 1024, "attention": UNTRACEABLE}))
    planned = Planned(tmp_path, fixed)
    found = planned.explain(planned.first(Origin.UNKNOWN))
    assert found.training_plan.model["attn_implementation"] == UNTRACEABLE
    assert (found.groups, found.peaks, found.times, found.peak) == ((), (), (), None)


def test_it_survives_json(planned: Planned) -> None:
    found = planned.explain(planned.first(Origin.COMPOSED))
    assert decode(Explanation, json.loads(json.dumps(encode(found)))) == found
