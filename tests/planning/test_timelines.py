"""The memory timeline of a candidate, compared with its estimate and with a full-size trace of the step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.core.documents.estimate import Estimate, MemoryEstimate, Origin
from autotune.core.documents.memory_timeline import MAX_MOMENTS, OUTSIDE_TENSORS, Mark, MemoryTimeline
from autotune.core.program import MICRO_BATCH, OPTIMIZER_STEP
from autotune.core.timeline import Occurrence, Part
from autotune.planning.evaluator import Evaluator
from autotune.planning.single import TracedPlan
from autotune.planning.vllm import SLEEPING_BYTES, Engine
from autotune.trainers.prompts import GENERATION
from tests.planning.stand_in import WEIGHT_BYTES, AnalyticTracer
from tests.planning.test_evaluator import LAYERS, TOKENS, problem_of, searched
from tests.settings import workload

FIRST, FURTHER, UPDATE = (
    Part(MICRO_BATCH, Occurrence.FIRST),
    Part(MICRO_BATCH, Occurrence.FURTHER),
    Part(OPTIMIZER_STEP, Occurrence.ONCE),
)


@pytest.fixture(scope="module")
def evaluator(tmp_path_factory: pytest.TempPathFactory) -> Evaluator:
    return searched(problem_of(), AnalyticTracer(), tmp_path_factory.mktemp("cache"))


def tensors(memory: MemoryEstimate) -> dict[str, int]:
    """Return the parts of a breakdown that are bytes of tensors."""
    return {name: size for name, size in memory.breakdown.items() if name not in OUTSIDE_TENSORS}


def test_the_highest_moment_of_every_candidate_is_the_peak_of_its_estimate(evaluator: Evaluator) -> None:
    seen = set[int]()
    for candidate in evaluator.candidates:
        estimate, timeline = evaluator.estimate(candidate), evaluator.timeline(candidate)
        if estimate.memory is None:
            assert timeline is None
            continue
        assert timeline is not None
        rounding_bytes = estimate.memory.breakdown.get("rounding", 0)
        assert max(timeline.totals) == timeline.totals[timeline.peak] == estimate.memory.peak_bytes - rounding_bytes
        assert timeline.at(timeline.peak) == tensors(estimate.memory)
        assert timeline.need_bytes == estimate.memory.device_bytes
        seen.add(timeline.micro_batches)
    assert len(seen) > 1


def test_activations_grow_evenly_from_layer_to_layer(evaluator: Evaluator) -> None:
    stored = evaluator.problem.baseline.but(gradient_checkpointing="off", liger="off")
    candidate = stored.but(per_device_train_batch_size=4)
    evaluator.run([candidate])
    timeline = evaluator.timeline(candidate)
    assert timeline is not None
    assert timeline.followed
    assert [(mark.part, mark.backward) for mark in timeline.marks] == [
        (FIRST, True),
        (FURTHER, True),
        (UPDATE, True),
    ]
    for place, gradients in ((0, 0), (1, WEIGHT_BYTES * LAYERS)):
        moments = timeline.stretch(place)
        kept = [timeline.levels["activation"][moment] for moment in moments]
        assert kept == [60_000 * 4 * TOKENS * layer for layer in [*range(1, LAYERS + 1), LAYERS]]
        assert {timeline.levels["gradient"][moment] for moment in moments} == {gradients}


def test_a_step_of_one_micro_batch_has_no_further_one(evaluator: Evaluator) -> None:
    candidate = evaluator.problem.baseline.but(per_device_train_batch_size=8)
    evaluator.run([candidate])
    timeline = evaluator.timeline(candidate)
    assert timeline is not None
    assert FURTHER not in [mark.part for mark in timeline.marks]


def a_timeline(totals: list[int], marks: tuple[Mark, ...] = (Mark(FIRST, False, 0),)) -> MemoryTimeline:
    halves = {
        "parameter": tuple(total // 2 for total in totals),
        "activation": tuple(-(-total // 2) for total in totals),
    }
    return MemoryTimeline(marks, halves, totals.index(max(totals)), {}, 0.1, True, 1)


def test_thinning_keeps_every_peak_and_the_beginning_of_every_part() -> None:
    totals = [100 + moment % 7 for moment in range(2000)]
    totals[1234], totals[1999] = 999, 500
    marks = (Mark(FIRST, False, 0), Mark(FIRST, True, 800), Mark(UPDATE, False, 1995))
    thin = a_timeline(totals, marks).thinned()
    assert thin.moments < MAX_MOMENTS + 12
    assert thin.totals[thin.peak] == max(thin.totals) == 999
    assert [max(thin.totals[moment] for moment in thin.stretch(place)) for place in range(3)] == [106, 999, 500]
    assert len(thin.stretch(2)) == 5
    assert a_timeline(totals[:200]).thinned().moments == 200


def test_what_vllm_holds_lies_beside_the_tensors(evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = evaluator.problem.baseline
    traced = evaluator.traced_plan(baseline)
    assert isinstance(traced, TracedPlan)
    generation = Part(GENERATION, Occurrence.ONCE)
    courses = {
        (generation, False): [{"parameter": 20}],
        (FIRST, False): [{"parameter": 40}, {"parameter": 59}],
        (UPDATE, False): [{"parameter": 60}],
    }
    stretches: Any = {at: SimpleNamespace(course=lambda found=found: found) for at, found in courses.items()}
    training = MemoryEstimate(
        70, 75, 5, {"parameter": 60, "rounding": 10, "fragmentation": 5, "context": 5}, 0, None, 0.1
    )
    awake = Engine(on_server=False, sleeps=True, utilization=0.5, parallel=1, tokens=None, model=workload().model,
                   total_bytes=60)  # fmt: skip
    both = awake.with_training(training)
    changed = replace(traced, memory=training, worst=replace(traced.worst, stretches=stretches))
    monkeypatch.setattr(evaluator, "traced_plan", lambda _: changed)
    monkeypatch.setattr(evaluator, "estimate", lambda _: Estimate(baseline, Origin.TRACED, both))
    monkeypatch.setattr("autotune.planning.evaluator.engine_of", lambda *_: awake)
    found = evaluator.timeline(baseline)
    assert found is not None
    assert found.levels == {"parameter": (20, 40, 59, 60), "vLLM": (30, *[SLEEPING_BYTES] * 3)}
    assert found.need_bytes == both.device_bytes
    assert found.at(found.peak) == {"parameter": 60, "vLLM": SLEEPING_BYTES}
