"""Evaluation in plans: its own shape and layout, and its peak next to that of training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.jobs.traced import TraceReply
from autotune.core.plan import PASS_ROWS, TrainingPlan
from autotune.core.program import EVALUATE, PRECOMPUTE
from autotune.core.rows.batch_geometry import BatchGeometry, Layout, Shape, Typical
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.timeline import Occurrence, Part
from autotune.core.workload import ModelSource
from autotune.inspection.gpus import find_gpu
from autotune.planning.evaluator import Evaluator
from autotune.planning.extrapolation.fit import Fit
from autotune.planning.single import SizedPlan, TracedPlan, trace_request
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.store import Traces
from autotune.probing import trace
from autotune.probing.server import Worker
from autotune.study.improvement import search_by_traces
from autotune.units import GIB, MIB
from tests.planning.stand_in import EVALUATED_BYTES, WEIGHT_BYTES, AnalyticTracer
from tests.settings import GPU, problem, setting, workload
from tests.small import write_small_model

LAYERS = 16
TRAINED, EVALUATED = 128, 4096
H100 = find_gpu("H100-80GB")
PLAIN: dict[str, str | int] = {
    "max_length": EVALUATED, "attention": "sdpa", "liger": "off", "precision": "float32", "padding_free": "off",
    "optimizer": "adamw_torch", "activation_offloading": "off", "packing": "none", "gradient_checkpointing": "on",
    "pad_to_multiple_of": "none", "hub_kernels": "off",
}  # fmt: skip


def evaluator_of(
    tracer: AnalyticTracer, directory: Path, evaluated: dict[int, int] | None, **fixed: str | int
) -> Evaluator:
    """Return an evaluator of rows of 128 tokens, evaluated on rows of other lengths, after a search."""
    of = workload(lengths={TRAINED: 64}, layer_kinds=("full",) * LAYERS)
    if evaluated is not None:
        profile = replace(of.dataset, lengths=LengthDistribution(evaluated))
        of = replace(of, evaluation=profile, evaluation_source=of.dataset_source)
    found = problem(setting(machine=GPU, of=of), {**PLAIN, **fixed})
    evaluator = Evaluator(found, H100, 80 * GIB, Traces(tracer, Cache(directory), "model", {}))
    search_by_traces(found, evaluator)
    return evaluator


def test_the_need_is_that_of_evaluation_where_its_rows_are_longer(tmp_path: Path) -> None:
    evaluator = evaluator_of(AnalyticTracer(), tmp_path, {EVALUATED: 64}, per_device_train_batch_size=1)
    baseline = evaluator.problem.baseline
    sizes = {rows: baseline.but(per_device_eval_batch_size=rows) for rows in (1, 2, 4, 8, 16, 32)}
    evaluator.run(list(sizes.values()))
    assert {item["max_length"] for item in sizes.values()} == {EVALUATED}
    trained = 4 * WEIGHT_BYTES * LAYERS + 4_000 * TRAINED * LAYERS + 4_000 * TRAINED
    for rows, candidate in sizes.items():
        memory = evaluator.estimate(candidate).memory
        assert memory is not None
        evaluated = 3 * WEIGHT_BYTES * LAYERS + EVALUATED_BYTES * rows * EVALUATED
        assert memory.peak_bytes == pytest.approx(max(trained, evaluated) + 64 * MIB, rel=0.001)
    # It changes nothing of the speed of training.
    assert len({evaluator.estimate(candidate).tokens_per_second for candidate in sizes.values()}) == 1


def test_without_rows_to_evaluate_on_its_size_is_not_searched(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    evaluator = evaluator_of(tracer, tmp_path, None, per_device_train_batch_size=1)
    assert {item["per_device_eval_batch_size"] for item in evaluator.candidates} == {8}
    assert not any(request.plan.evaluates for request in tracer.requests)


def test_another_layout_is_traced_beside(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    wanted = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 32}
    evaluator = evaluator_of(tracer, tmp_path, {EVALUATED: 2, 700: 60}, **wanted)
    candidate = evaluator.problem.baseline
    traced = evaluator.traced_plan(candidate)
    assert isinstance(traced, TracedPlan)
    assert traced.geometry.evaluation is not None
    assert (traced.geometry.layout, traced.geometry.evaluation.layout) == (Layout.EQUAL, Layout.PADDED)
    # Equal rows and padded rows were traced: in the latter, one is a token shorter.
    assert {len(set(request.worst)) for request in tracer.requests} == {1, 2}
    memory = evaluator.estimate(candidate).memory
    assert memory is not None
    evaluated = 3 * WEIGHT_BYTES * LAYERS + EVALUATED_BYTES * 32 * EVALUATED
    assert memory.peak_bytes == pytest.approx(evaluated + 64 * MIB, rel=0.001)


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_evaluation_at_another_shape_follows_from_few_layers(target: str, worker: Worker, tmp_path: Path) -> None:
    source = ModelSource(str(write_small_model(tmp_path / "model", weights=False, num_hidden_layers=6)))
    here = setting(machine=GPU, of=replace(workload(), model_source=source))
    plan = TrainingPlan("sft", {"gradient_checkpointing": True, "bf16": True, "eval_strategy": "epoch"})

    def run(depth: int, shape: Shape) -> TraceReply:
        request = trace_request(plan, Layout.PADDED, shape, depth, here, H100)
        request = replace(request, target=target)  # type: ignore[arg-type]
        return trace(worker, request, tmp_path / f"{depth}-{shape.rows}-{shape.tokens}")

    trained, evaluated = Shape(8, 64), Shape(4, 200)
    fits = {shape: Fit({depth: run(depth, shape) for depth in (2, 3)}, 6) for shape in (trained, evaluated)}
    foretold = fits[trained].forecast(2).with_phase(EVALUATE, fits[evaluated].forecast(1), per_step=0.0)

    part = Part(EVALUATE, Occurrence.AFTER)
    whole = {shape: run(6, shape) for shape in (trained, evaluated)}
    (section,) = (item for item in whole[evaluated].sections if item.part == part)
    (at_training,) = (item for item in whole[trained].sections if item.part == part)
    found = sum(foretold.stretches[part, False].highest[1].values())
    assert found == pytest.approx(max(section.totals), rel=0.005)
    assert found > 1.05 * max(at_training.totals)
    others = [stretch.highest[1] for at, stretch in foretold.stretches.items() if at[0] != part]
    in_steps = [item for item in whole[trained].sections if item.part != part]
    steps = max(max(item.totals) for item in in_steps)
    assert max(sum(levels.values()) for levels in others) == pytest.approx(steps, rel=0.005)


def test_a_pass_of_the_reference_is_as_large_as_the_longest_rows_of_training_and_evaluation(
    worker: Worker, tmp_path: Path
) -> None:
    source = ModelSource(str(write_small_model(tmp_path / "model", weights=False)))
    here = setting(machine=GPU, of=replace(workload(), model_source=source))
    pass_of_many: dict[str, object] = {"precompute_ref_log_probs": True, PASS_ROWS: 32, "eval_strategy": "epoch"}
    plan = TrainingPlan("dpo", {"per_device_train_batch_size": 1, "bf16": True, **pass_of_many})
    short, long = Shape(1, 32), Shape(1, 200)
    replies = {
        shape: trace(worker, trace_request(plan, Layout.PADDED, shape, 2, here, H100), tmp_path / str(shape.tokens))
        for shape in (short, long)
    }
    part = Part(PRECOMPUTE, Occurrence.BEFORE)
    passes = {shape: section for shape, reply in replies.items() for section in reply.sections if section.part == part}
    fits = {(Layout.PADDED, shape): Fit({2: reply}, 2) for shape, reply in replies.items()}
    for trained, evaluated in ((short, long), (long, short)):
        geometry, evaluation = (
            BatchGeometry(Layout.PADDED, shape, (Typical(shape),), 64.0, 1.0, 64) for shape in (trained, evaluated)
        )
        sized = SizedPlan(plan, replace(geometry, evaluation=evaluation))
        foretold = sized.forecast(fits, (Layout.PADDED, trained))
        assert sum(foretold.stretches[part, False].highest[1].values()) == max(passes[long].totals)
        # It counts as part of training in the pass over the rows to train on alone.
        time = passes[trained].time
        assert time is not None
        assert foretold.times[part].busiest_seconds == pytest.approx(time.busiest_seconds / 32 / 3)


@pytest.mark.slow
@pytest.mark.parametrize("args", [{}, {"eval_strategy": "epoch"}], ids=["trained", "evaluated"])
def test_steps_alone_are_those_of_a_trace_with_evaluation_and_save(
    args: dict[str, str], worker: Worker, tmp_path: Path
) -> None:
    source = ModelSource(str(write_small_model(tmp_path / "model", weights=False)))
    here = setting(machine=GPU, of=replace(workload(), model_source=source))
    plan = TrainingPlan("sft", {"gradient_checkpointing": True, "bf16": True, **args})

    def run(*, steps_alone: bool) -> TraceReply:
        request = trace_request(plan, Layout.PADDED, Shape(2, 64), 2, here, H100)
        return trace(worker, replace(request, steps_alone=steps_alone), tmp_path / str(steps_alone))

    whole, alone = run(steps_alone=False), run(steps_alone=True)
    in_steps = [section for section in whole.sections if section.part.occurrence is not Occurrence.AFTER]
    assert list(alone.sections) == in_steps
    assert len(in_steps) == len(whole.sections) - (2 if args else 1)
    assert alone.own.replays == ()
