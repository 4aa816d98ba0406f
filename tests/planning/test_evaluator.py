"""The evaluator with traces from a formula: shared traces, followed phases and the ranking."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.documents.estimate import Origin, distinct, smallest_changes
from autotune.inspection.gpus import find_gpu
from autotune.planning.evaluator import Evaluator
from autotune.planning.single import TracedPlan
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.store import Traces
from autotune.study.improvement import search_by_traces
from autotune.trainers.problem import TrainerProblem
from autotune.units import GIB, MIB
from tests.planning.stand_in import (
    ASSUMED,
    GROWN_BYTES,
    UNTRACEABLE,
    UNUSED,
    WEIGHT_BYTES,
    AnalyticTracer,
    LosingOnce,
    LosingTracer,
)
from tests.settings import GPU, machine_with, problem, setting, workload

LAYERS = 16
TOKENS = 1024
H100 = find_gpu("H100-80GB")


def problem_of(lengths: dict[int, int] | None = None, **fixed: str | int) -> TrainerProblem:
    """Return the shipped space for a model of 16 layers, by default on rows of 1,024 tokens."""
    of = workload(lengths=lengths or {TOKENS: 8}, layer_kinds=("full",) * LAYERS)
    return problem(setting(machine=GPU, of=of), {"max_length": TOKENS, **fixed})


def evaluator_of(
    problem: TrainerProblem, tracer: AnalyticTracer, directory: Path, budget_bytes: int = 10 * GIB
) -> Evaluator:
    """Return an evaluator that has evaluated nothing yet."""
    return Evaluator(problem, H100, budget_bytes, Traces(tracer, Cache(directory), "model", {}))


def searched(problem: TrainerProblem, tracer: AnalyticTracer, directory: Path) -> Evaluator:
    """Return an evaluator after a search."""
    evaluator = evaluator_of(problem, tracer, directory)
    search_by_traces(problem, evaluator)
    return evaluator


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Evaluator, AnalyticTracer]:
    tracer = AnalyticTracer()
    evaluator = searched(problem_of(), tracer, tmp_path_factory.mktemp("cache"))
    evaluator.run([evaluator.problem.baseline.but(attention=UNTRACEABLE)])
    return evaluator, tracer


def test_where_vllm_does_not_start_that_is_why_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.planning.evaluator.with_vllm", lambda *_: "vLLM does not start")
    evaluator = evaluator_of(problem_of(), AnalyticTracer(), tmp_path)
    evaluator.run([evaluator.problem.baseline])
    assert evaluator.unknown_reason == "vLLM does not start"


def test_each_candidate_is_traced_at_its_own_sizes_and_at_few_layers(whole: tuple[Evaluator, AnalyticTracer]) -> None:
    evaluator, tracer = whole
    assert len(evaluator.candidates) <= 100
    # With every second layer checkpointed, 4 and 6; with the last five offloaded inputs on the device, all rather than
    # 10 and 11, which are more together.
    assert {request.layers for request in tracer.requests} == {2, 3, 4, 6, LAYERS}
    assert {found.origin for found in evaluator.ranked()} <= {Origin.TRACED, Origin.UNKNOWN}
    # Rows that are laid end to end are one row for a trace.
    apart = [each for each in evaluator.candidates if (each["packing"], each["padding_free"]) == ("none", "off")]
    rows = {candidate["per_device_train_batch_size"] for candidate in apart}
    assert len(rows) > 1
    assert rows <= {int(str(request.plan.args["per_device_train_batch_size"])) for request in tracer.requests}


def test_peaks_at_full_depth_and_batch_are_those_of_the_formula(whole: tuple[Evaluator, AnalyticTracer]) -> None:
    evaluator, _ = whole
    stored = evaluator.problem.baseline.but(gradient_checkpointing="off", attention="sdpa", liger="off")
    for rows in (1, 2, 4):
        (estimate,) = evaluator.run([stored.but(per_device_train_batch_size=rows)])
        tokens, held = rows * TOKENS, 4 * WEIGHT_BYTES * LAYERS
        assert estimate.memory is not None
        tensors = held + 60_000 * tokens * LAYERS + 60_000 * tokens
        assert estimate.memory.peak_bytes == pytest.approx(tensors + 64 * MIB, rel=1e-6)
        assert estimate.memory.breakdown["activation"] == 60_000 * tokens * LAYERS


def test_what_cannot_fit_is_traced_at_its_largest_micro_batches_alone(tmp_path: Path) -> None:
    space, tracer = problem_of({100: 60, 400: 30, TOKENS: 10}), AnalyticTracer()
    evaluator = evaluator_of(space, tracer, tmp_path)
    stored = space.baseline.but(gradient_checkpointing="off", attention="sdpa", liger="off")
    small, large = (stored.but(per_device_train_batch_size=rows) for rows in (1, 4))
    fitting, _ = evaluator.run([small, large])
    assert fitting.memory is not None
    between = evaluator_of(space, tracer, tmp_path / "other", round(1.05 * fitting.memory.device_bytes))
    tracer.requests.clear()
    fitting, lacking = between.run([small, large])
    assert (fitting.may_fit, lacking.may_fit) == (True, False)
    assert fitting.tokens_per_second is not None
    assert lacking.tokens_per_second is None
    sizes = {rows: set[int]() for rows in (1, 4)}
    for request in tracer.requests:
        sizes[int(str(request.plan.args["per_device_train_batch_size"]))].add(max(row[0] for row in request.worst))
    assert sizes[4] == {TOKENS}
    assert min(sizes[1]) < TOKENS


def test_rows_that_are_packed_nearly_full_are_timed_by_the_full_ones_in_proportion(tmp_path: Path) -> None:
    space, tracer = problem_of({100: 60, 400: 30, TOKENS: 60}), AnalyticTracer()
    evaluator = evaluator_of(space, tracer, tmp_path)
    packed = space.baseline.but(packing="bfd", per_device_train_batch_size=1, gradient_checkpointing="off")
    (estimate,) = evaluator.run([packed])
    traced = evaluator.traced_plan(packed)
    assert isinstance(traced, TracedPlan)
    (own,) = traced.geometry.sizes
    assert own.shape.tokens < TOKENS
    assert {sum(row[0] for row in request.worst) for request in tracer.requests} == {TOKENS}
    # The formula of the stand-in: a part of the time does not depend on the tokens.
    seconds = traced.geometry.micro_batches * (0.001 + 1e-6 * own.shape.tokens) + 0.001
    assert estimate.tokens_per_second == pytest.approx(traced.geometry.tokens_per_step / seconds, rel=0.03)


def test_the_speed_of_the_baseline_is_known_though_it_does_not_fit(tmp_path: Path) -> None:
    space = problem_of({100: 60, 400: 30, TOKENS: 10})
    (baseline,) = evaluator_of(space, AnalyticTracer(), tmp_path, budget_bytes=MIB).run([space.baseline])
    assert not baseline.may_fit
    assert baseline.tokens_per_second is not None


def test_where_the_optimizer_runs_on_the_host_no_micro_batch_is_traced_for_its_time(tmp_path: Path) -> None:
    of = problem_of({100: 60, 400: 30, TOKENS: 10}).setting.workload
    eight = machine_with(GPU, processes=8)
    space = problem(setting(machine=eight, global_batch_size=64, of=of), {"max_length": TOKENS})
    tracer = AnalyticTracer()
    evaluator = evaluator_of(space, tracer, tmp_path)
    sharded = space.baseline.but(sharding="fsdp2", optimizer="adamw_torch", per_device_train_batch_size=1)
    found = {}
    for offload in ("none", "both"):
        tracer.requests.clear()
        (estimate,) = evaluator.run([space.normal(sharded.but(offload=offload))])
        assert estimate.fits
        assert (estimate.tokens_per_second is None) is (offload == "both")
        found[offload] = {max(row for (row,) in request.worst) for request in tracer.requests}
    assert min(found["none"]) < TOKENS
    assert found["both"] == {TOKENS}


def test_micro_batches_that_give_no_memory_are_traced_without_evaluation_and_save(tmp_path: Path) -> None:
    space, tracer = problem_of({100: 60, 400: 30, TOKENS: 10}), AnalyticTracer()
    evaluator_of(space, tracer, tmp_path).run([space.baseline])
    widths = {alone: set[int]() for alone in (False, True)}
    for request in tracer.requests:
        widths[request.steps_alone].add(max(row for (row,) in request.worst))
    assert widths[False] == {TOKENS}
    assert widths[True]
    assert max(widths[True]) < TOKENS


def test_a_step_of_one_micro_batch_holds_no_gradients_beside_its_activations(
    whole: tuple[Evaluator, AnalyticTracer],
) -> None:
    evaluator, _ = whole
    stored = evaluator.problem.baseline.but(gradient_checkpointing="off", per_device_train_batch_size=8)
    memory = evaluator.run([stored])[0].memory
    assert memory is not None
    assert "gradient" not in memory.breakdown


def test_the_parts_of_an_estimate_make_the_whole(whole: tuple[Evaluator, AnalyticTracer]) -> None:
    found = [(each.memory, each.spare_bytes) for each in whole[0].ranked() if each.memory is not None]
    assert found
    for memory, spare_bytes in found:
        assert sum(memory.breakdown.values()) == memory.device_bytes
        assert spare_bytes == 10 * GIB - memory.device_bytes


def test_those_that_fit_come_first_and_the_fastest_of_them_first(whole: tuple[Evaluator, AnalyticTracer]) -> None:
    ranked = whole[0].ranked()
    fitting = [estimate for estimate in ranked if estimate.fits]
    assert 0 < len(fitting) < len(ranked)
    assert ranked[: len(fitting)] == fitting
    rates = [estimate.tokens_per_second or 0 for estimate in fitting]
    assert rates == sorted(rates, reverse=True)


def test_of_those_that_do_not_fit_the_nearest_to_fitting_comes_first(whole: tuple[Evaluator, AnalyticTracer]) -> None:
    ranked = whole[0].ranked()
    needs = [estimate.memory.device_bytes for estimate in ranked if estimate.memory is not None and not estimate.fits]
    assert len(needs) > 1
    assert needs == sorted(needs)


def test_what_traces_assumed_is_told_once(whole: tuple[Evaluator, AnalyticTracer]) -> None:
    assert {text for each in whole[0].traced_plans for text in each.memory.assumptions} == {ASSUMED}


def test_what_cannot_be_traced_is_said_and_left_to_a_probe(whole: tuple[Evaluator, AnalyticTracer]) -> None:
    evaluator, _ = whole
    unknown = [estimate for estimate in evaluator.ranked() if estimate.origin is Origin.UNKNOWN]
    assert unknown
    assert {estimate.candidate["attention"] for estimate in unknown} == {UNTRACEABLE}
    assert not any(estimate.fits for estimate in unknown)
    assert set(evaluator.untraceable.values()) == {"flex_attention is not supported"}


def test_candidates_whose_training_plans_are_the_same_are_traced_once(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    here = problem_of()
    evaluator = evaluator_of(here, tracer, tmp_path)
    evaluator.run([here.baseline, here.baseline])
    traced = len(tracer.requests)
    evaluator.run([here.baseline])
    evaluator.for_problem(here).run([here.baseline])
    assert 0 < traced == len(tracer.requests)


def test_a_candidate_that_was_not_evaluated_is_unknown(tmp_path: Path) -> None:
    here = problem_of()
    found = evaluator_of(here, AnalyticTracer(), tmp_path).estimate(here.baseline)
    assert (found.origin, found.reason) == (Origin.UNKNOWN, "it was not traced")


def test_the_worst_rows_and_those_of_mean_width_are_traced_each_with_a_shorter_one(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    here = problem_of({TOKENS: 4, 100: 4}, per_device_train_batch_size=2)
    evaluator_of(here, tracer, tmp_path).run([here.baseline])
    # Beside the longest row, one that is a token shorter brings padding.
    widths = {row for request in tracer.requests for (row,) in request.worst}
    assert {TOKENS, TOKENS - 1} < widths
    assert len(widths) > 2


def test_kept_traces_are_not_run_again(tmp_path: Path) -> None:
    here = problem_of(attention="sdpa", liger="off", precision="float32")
    first, second = AnalyticTracer(), AnalyticTracer()
    plans = [searched(here, tracer, tmp_path).ranked() for tracer in (first, second)]
    assert first.requests
    assert second.requests == []
    assert plans[0] == plans[1]


def test_a_broken_entry_is_dropped_and_traced_again(tmp_path: Path) -> None:
    here = problem_of(attention="sdpa", liger="off", precision="float32", optimizer="adamw_torch")
    first = searched(here, AnalyticTracer(), tmp_path).ranked()
    files = sorted(tmp_path.glob("*.json"))
    files[0].write_text("{")
    files[1].write_text('{"kind": "reply", "body": {}}')
    tracer = AnalyticTracer()
    assert searched(here, tracer, tmp_path).ranked() == first
    assert len(tracer.requests) == 2


def test_the_smallest_change_is_the_nearest_that_fits(whole: tuple[Evaluator, AnalyticTracer]) -> None:
    ranked = whole[0].ranked()
    asked = [estimate for estimate in ranked if estimate.memory is not None and not estimate.fits][:5]
    changes = smallest_changes(asked, ranked)
    assert [change.candidate for change in changes] == [estimate.candidate for estimate in asked]
    for change in changes:
        distance = len(change.instead.candidate.differences(change.candidate))
        assert change.instead.fits
        assert all(len(other.candidate.differences(change.candidate)) >= distance for other in ranked if other.fits)


def test_without_a_candidate_that_fits_there_is_no_change_to_propose(whole: tuple[Evaluator, AnalyticTracer]) -> None:
    too_large = [estimate for estimate in whole[0].ranked() if not estimate.fits]
    assert smallest_changes(too_large[:1], too_large) == ()


def test_what_was_lost_is_traced_another_time(tmp_path: Path) -> None:
    here = problem_of()
    lost, tracer = LosingTracer(), AnalyticTracer()
    evaluator_of(here, lost, tmp_path).run([here.baseline])
    (found,) = evaluator_of(here, tracer, tmp_path).run([here.baseline])
    assert 0 < len(lost.requests) == len(tracer.requests)
    assert found.origin is Origin.TRACED


def test_what_a_time_limit_has_cut_off_is_traced_when_it_is_asked_for_again(tmp_path: Path) -> None:
    here = problem_of()
    evaluator = evaluator_of(here, LosingOnce(), tmp_path)
    lost, found = (evaluator.run([here.baseline])[0] for _ in range(2))
    assert (lost.origin, lost.reason) == (Origin.UNKNOWN, "no time was left")
    assert found.origin is Origin.TRACED
    assert evaluator.untraceable == {}


def test_what_is_reserved_and_what_varied_lengths_add_is_traced_for_the_asked_candidate_at_full_depth(
    tmp_path: Path,
) -> None:
    tracer = AnalyticTracer()
    here = problem_of({TOKENS: 8, 64: 8}, attention="sdpa", liger="off", precision="float32")
    evaluator = searched(here, tracer, tmp_path)
    best, *others = evaluator.ranked()
    assert best.memory is not None
    second = next(one for one in others if one.memory and one.memory.device_bytes != best.memory.device_bytes)
    assert best.memory.varied_bytes is None
    asked = len(tracer.requests)

    evaluator.trace_full_depth([best.candidate])

    found = evaluator.estimate(best.candidate).memory
    assert found is not None
    share, varied_bytes = UNUSED[str(best.candidate["allocator"])]
    assert found.varied_bytes == varied_bytes
    assert found.most_bytes == round(found.device_bytes * (1 + found.error)) + varied_bytes
    # The stand-in leaves a share of what is allocated unused, whatever the depth: few layers show less of it.
    assert found.peak_bytes == best.memory.peak_bytes
    assert found.reserved_bytes == pytest.approx(share * found.peak_bytes, rel=1e-6)
    assert found.device_bytes > best.memory.device_bytes
    other = evaluator.estimate(second.candidate).memory
    assert other is not None
    assert other.varied_bytes is None
    request = tracer.requests[asked]
    assert (len(tracer.requests), request.layers, request.varied) == (asked + 1, LAYERS, True)
    # Rows one after another, or end to end.
    assert int(str(request.plan.args["max_length"])) * int(
        str(request.plan.args["per_device_train_batch_size"])
    ) == TOKENS * int(str(best.candidate["per_device_train_batch_size"]))


def test_the_candidates_that_a_plan_shows_are_traced_at_full_depth(tmp_path: Path) -> None:
    tracer, count = AnalyticTracer(), 3
    evaluator = searched(problem_of({TOKENS: 8, 64: 8}), tracer, tmp_path)
    asked = len(tracer.requests)

    evaluator.confirm_at_full_depth(count)

    shown = [*distinct(evaluator.ranked(), count), evaluator.estimate(evaluator.problem.baseline)]
    traced = [evaluator.traced_plan(each.candidate) for each in shown]
    assert all(isinstance(each, TracedPlan) for each in traced)
    depths = [[depth for depth, *_ in each.fit.weighted()] for each in traced if isinstance(each, TracedPlan)]
    assert depths == [[LAYERS]] * len(traced)
    # The best one is traced once more. The stand-in leaves so much unused at full depth that many are replaced.
    *once, last = tracer.requests[asked:]
    assert len(once) > count
    assert {(request.layers, request.varied) for request in once} == {(LAYERS, False)}
    assert (last.layers, last.varied) == (LAYERS, True)


def test_rows_of_one_length_vary_nothing_and_what_cannot_be_traced_is_not_known(tmp_path: Path) -> None:
    tracer, here = AnalyticTracer(), problem_of()
    equal = evaluator_of(here, tracer, tmp_path / "equal")
    equal.run([here.baseline])
    equal.trace_full_depth([here.baseline])
    memory = equal.estimate(here.baseline).memory
    assert memory is not None
    assert (memory.varied_bytes, tracer.requests[-1].layers, tracer.requests[-1].varied) == (0, LAYERS, False)

    lost = evaluator_of(here, LosingTracer(), tmp_path / "lost")
    lost.run([here.baseline])
    lost.trace_full_depth([here.baseline])
    assert lost.estimate(here.baseline).memory is None


def test_candidates_that_differ_in_the_allocator_share_traces_and_reserve_what_its_replay_reserves(
    tmp_path: Path,
) -> None:
    tracer = AnalyticTracer()
    here = problem_of()
    evaluator = evaluator_of(here, tracer, tmp_path)
    evaluator.run([here.baseline])
    traced = len(tracer.requests)
    fixed, growing = here.baseline, here.baseline.but(allocator="expandable_segments")
    evaluator.run([growing])
    memories = [evaluator.estimate(candidate).memory for candidate in (fixed, growing)]

    assert len(tracer.requests) == traced
    assert memories[0] is not None
    assert memories[1] is not None
    assert memories[0].peak_bytes == memories[1].peak_bytes
    unused = [memory.breakdown["fragmentation"] for memory in memories if memory is not None]
    assert unused[1] == pytest.approx(unused[0] / 5, rel=1e-6)
    assert evaluator.estimate(fixed).tokens_per_second == evaluator.estimate(growing).tokens_per_second


def test_varied_lengths_are_replayed_with_the_allocator_of_the_candidate(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    here = problem_of({TOKENS: 4, 100: 4})
    evaluator = evaluator_of(here, tracer, tmp_path)
    growing = here.baseline.but(allocator="expandable_segments")
    evaluator.run([growing])
    evaluator.trace_full_depth([growing])
    memory = evaluator.estimate(growing).memory
    assert memory is not None
    assert memory.varied_bytes == GROWN_BYTES
