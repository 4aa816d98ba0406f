"""The planner on traces that a formula stands in for: what is shared, followed, composed and ranked."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.estimate import Estimate, Origin
from autotune.inspection.gpus import find_gpu
from autotune.planning.candidates import legal_candidates
from autotune.planning.changes import smallest_changes
from autotune.planning.planner import Planner
from autotune.planning.target import Accelerator
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.store import Traces
from autotune.space import Wishes
from autotune.trainers.problem import TrainerProblem
from autotune.units import GIB, MIB
from tests.planning.stand_in import ASSUMED, VARIED_BYTES, WEIGHT_BYTES, AnalyticTracer, LosingTracer
from tests.settings import GPU, problem, setting, workload

LAYERS = 16
TOKENS = 1024
H100 = find_gpu("H100-80GB")


def problem_of(lengths: dict[int, int] | None = None, **fixed: str | int) -> TrainerProblem:
    where = setting(machine=GPU, of=workload(lengths=lengths or {TOKENS: 8}))
    return problem(where, Wishes({"max_length": TOKENS, **fixed}))


def planner_of(problem: TrainerProblem, tracer: AnalyticTracer, directory: Path, budget_bytes: int) -> Planner:
    traces = Traces(tracer, Cache(directory), "model", {})
    target = Accelerator(H100, budget_bytes)
    return Planner(problem, target, traces, ("full",) * LAYERS, legal_candidates(problem))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Planner, AnalyticTracer]:
    tracer = AnalyticTracer()
    planner = planner_of(problem_of(), tracer, tmp_path_factory.mktemp("cache"), 10 * GIB)
    planner.explore(14)
    planner.refine(lambda ranked: ranked[:10], 8)
    return planner, tracer


def test_the_whole_space_needs_few_traces(whole: tuple[Planner, AnalyticTracer]) -> None:
    planner, tracer = whole
    assert len(planner.candidates) > 3000
    assert len(tracer.requests) < 130
    assert {request.layers for request in tracer.requests} == {2, 3, 4}


def test_peaks_at_full_depth_and_batch_are_those_of_the_formula(whole: tuple[Planner, AnalyticTracer]) -> None:
    planner, _ = whole
    baseline = planner.candidates[0].but(gradient_checkpointing="off", attention="sdpa", liger="off")
    for rows in (1, 2, 4):
        estimate = planner.estimate(baseline.but(per_device_train_batch_size=rows))
        tokens, held = rows * TOKENS, 4 * WEIGHT_BYTES * LAYERS
        assert estimate.memory is not None
        tensors = held + 60_000 * tokens * LAYERS + 60_000 * tokens
        assert estimate.memory.peak_bytes == pytest.approx(tensors + 64 * MIB, rel=1e-6)
        assert estimate.memory.breakdown["activation"] == 60_000 * tokens * LAYERS


def test_a_step_of_one_micro_batch_holds_no_gradients_beside_its_activations(
    whole: tuple[Planner, AnalyticTracer],
) -> None:
    planner, _ = whole
    candidate = planner.candidates[0].but(gradient_checkpointing="off", per_device_train_batch_size=8)
    memory = planner.estimate(candidate).memory
    assert memory is not None
    assert "gradient" not in memory.breakdown


def test_the_parts_of_an_estimate_make_the_whole(whole: tuple[Planner, AnalyticTracer]) -> None:
    for estimate in whole[0].ranked():
        if estimate.memory is not None:
            assert sum(estimate.memory.breakdown.values()) == estimate.memory.device_bytes
            assert estimate.spare_bytes == 10 * GIB - estimate.memory.device_bytes


def test_those_that_fit_come_first_and_the_fastest_of_them_first(whole: tuple[Planner, AnalyticTracer]) -> None:
    ranked = whole[0].ranked()
    fitting = [estimate for estimate in ranked if estimate.fits]
    assert 0 < len(fitting) < len(ranked)
    assert ranked[: len(fitting)] == fitting
    rates = [estimate.tokens_per_second or 0 for estimate in fitting]
    assert rates == sorted(rates, reverse=True)


def test_of_those_that_do_not_fit_the_nearest_to_fitting_comes_first(whole: tuple[Planner, AnalyticTracer]) -> None:
    ranked = whole[0].ranked()
    needs = [estimate.memory.device_bytes for estimate in ranked if estimate.memory is not None and not estimate.fits]
    assert len(needs) > 1
    assert needs == sorted(needs)


def test_what_traces_assumed_is_told_once(whole: tuple[Planner, AnalyticTracer]) -> None:
    assert whole[0].assumptions == [ASSUMED]


def test_what_cannot_be_traced_is_said_and_left_to_a_probe(whole: tuple[Planner, AnalyticTracer]) -> None:
    planner, _ = whole
    unknown = [estimate for estimate in planner.ranked() if estimate.origin is Origin.UNKNOWN]
    assert unknown
    assert {estimate.candidate["attention"] for estimate in unknown} == {"flex_attention"}
    assert not any(estimate.fits for estimate in unknown)
    assert list(planner.untraceable.values()) == ["flex_attention is not supported"]


def test_the_best_stand_on_traces_of_their_own(whole: tuple[Planner, AnalyticTracer]) -> None:
    assert whole[0].ranked()[0].origin is Origin.TRACED


def test_a_small_space_is_traced_whole(tmp_path: Path) -> None:
    problem = problem_of(attention="sdpa", liger="off", optimizer="adamw_torch", activation_offloading="off",
                         packing="none", precision="float32", padding_free="off")  # fmt: skip
    planner = planner_of(problem, AnalyticTracer(), tmp_path, 10 * GIB)
    planner.explore(14)
    assert {estimate.origin for estimate in planner.ranked()} == {Origin.EXTRAPOLATED}


def test_candidates_that_share_no_traces_are_traced_at_their_own_sizes(tmp_path: Path) -> None:
    here = problem_of({TOKENS: 4, 100: 4}, attention="sdpa", packing="none", padding_free="off", liger="off",
                      optimizer="adamw_torch", per_device_train_batch_size=2, allocator="default",
                      torch_empty_cache_steps="off", pad_to_multiple_of="none", precision="float32",
                      gradient_checkpointing="on")  # fmt: skip
    tracer = AnalyticTracer()
    planner = planner_of(here, tracer, tmp_path, 10 * GIB)
    planner.explore(14)
    assert {estimate.origin for estimate in planner.ranked()} == {Origin.TRACED}
    # The longest rows, and those of the mean width, each with a shorter one that brings padding.
    assert {row for request in tracer.requests for (row,) in request.worst} == {TOKENS, TOKENS - 1, 793, 792}


def test_kept_traces_are_not_run_again(tmp_path: Path) -> None:
    problem = problem_of(attention="sdpa", liger="off", precision="float32")
    first, second = AnalyticTracer(), AnalyticTracer()
    plans: list[list[Estimate]] = []
    for tracer in (first, second):
        planner = planner_of(problem, tracer, tmp_path, 10 * GIB)
        planner.explore(14)
        plans.append(planner.ranked())
    assert first.requests
    assert second.requests == []
    assert plans[0] == plans[1]


def test_a_broken_entry_is_dropped_and_traced_again(tmp_path: Path) -> None:
    problem = problem_of(attention="sdpa", liger="off", precision="float32", optimizer="adamw_torch")
    planner_of(problem, AnalyticTracer(), tmp_path, GIB).explore(14)
    files = sorted(tmp_path.glob("*.json"))
    files[0].write_text("{")
    files[1].write_text('{"kind": "reply", "body": {}}')
    tracer = AnalyticTracer()
    planner_of(problem, tracer, tmp_path, GIB).explore(14)
    assert len(tracer.requests) == 2


def test_the_smallest_change_is_the_nearest_that_fits(whole: tuple[Planner, AnalyticTracer]) -> None:
    ranked = whole[0].ranked()
    asked = [estimate for estimate in ranked if estimate.memory is not None and not estimate.fits][:5]
    changes = smallest_changes(asked, ranked)
    assert [change.candidate for change in changes] == [estimate.candidate for estimate in asked]
    for change in changes:
        distance = len(change.instead.candidate.differences(change.candidate))
        assert change.instead.fits
        assert all(len(other.candidate.differences(change.candidate)) >= distance for other in ranked if other.fits)


def test_without_a_candidate_that_fits_there_is_no_change_to_propose(whole: tuple[Planner, AnalyticTracer]) -> None:
    too_large = [estimate for estimate in whole[0].ranked() if not estimate.fits]
    assert smallest_changes(too_large[:1], too_large) == ()


def test_tracing_ends_when_it_is_not_to_go_on(tmp_path: Path) -> None:
    tracer, answers = AnalyticTracer(), iter([True, True, False])
    planner = planner_of(problem_of(), tracer, tmp_path, GIB)
    planner.explore(at_once=(1,), goes_on=lambda: next(answers))
    assert 0 < len(tracer.requests) < 16


def test_the_baseline_and_the_recipes_are_traced_first_and_can_be_ranked_then(tmp_path: Path) -> None:
    problem, seen = problem_of(), list[tuple[Estimate, ...]]()
    planner = planner_of(problem, AnalyticTracer(), tmp_path, 10 * GIB)

    def twice() -> bool:
        seen.append(tuple(found for found in planner.ranked() if found.origin is Origin.EXTRAPOLATED))
        return len(seen) < 3

    planner.explore(14, at_once=(1, 2), goes_on=twice)
    nothing, first, second = seen
    assert nothing == ()
    knobs = first[0].candidate.differences(problem.baseline).keys()
    assert knobs <= {"per_device_train_batch_size", "allocator", "torch_empty_cache_steps"}
    assert len({planner.group(found.candidate) for found in second}) == 3
    assert planner.to_come > 0


@pytest.mark.parametrize(("limit", "traced"), [(0, 0), (3, 1), (4, 2)])
def test_no_more_of_an_answer_is_traced_than_the_limit_allows(limit: int, traced: int, tmp_path: Path) -> None:
    planner = planner_of(problem_of(), AnalyticTracer(), tmp_path, 10 * GIB)
    planner.explore(1)
    assert planner.least() is not None
    composed = [found.candidate for found in planner.ranked() if found.origin is Origin.COMPOSED]
    answer = [composed[0], next(one for one in composed if one["optimizer"] != composed[0]["optimizer"])]
    planner.refine(lambda _: map(planner.estimate, answer), limit)
    assert [planner.estimate(candidate).origin for candidate in answer].count(Origin.TRACED) == traced


def test_whether_anything_fits_is_traced_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = planner_of(problem_of(), AnalyticTracer(), tmp_path, 10 * GIB)
    planner.explore(1)
    monkeypatch.setattr("autotune.planning.planner._UNDECIDED_AT_ONCE", 1)
    planner.refine(lambda ranked: ranked[:1], 0)
    (found,) = planner.traced(5)
    assert found.fits
    assert found == planner.least()


def test_choices_that_add_up_are_known_better_than_those_that_may_not(tmp_path: Path) -> None:
    planner = planner_of(problem_of(), AnalyticTracer(), tmp_path, 10 * GIB)
    planner.explore(1)
    composed = [found for found in planner.ranked() if found.origin is Origin.COMPOSED and found.memory is not None]
    errors = {found.memory.error for found in composed if found.memory is not None}
    assert min(errors) < 0.2 < max(errors)


def test_what_was_lost_is_traced_another_time(tmp_path: Path) -> None:
    problem = problem_of(attention="sdpa", liger="off", precision="float32", optimizer="adamw_torch")
    lost = LosingTracer()
    planner_of(problem, lost, tmp_path, GIB).explore()
    assert lost.requests
    tracer = AnalyticTracer()
    planner = planner_of(problem, tracer, tmp_path, GIB)
    planner.explore()
    assert len(tracer.requests) == len(lost.requests)
    assert all(found.origin is not Origin.UNKNOWN for found in planner.ranked())


def test_what_varied_lengths_add_is_traced_for_the_asked_candidate_at_its_depth_and_size(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    problem = problem_of({TOKENS: 8, 64: 8}, attention="sdpa", liger="off", precision="float32")
    planner = planner_of(problem, tracer, tmp_path, 10 * GIB)
    planner.explore()
    best, *others = planner.ranked()
    assert best.memory is not None
    second = next(one for one in others if one.memory and one.memory.device_bytes != best.memory.device_bytes)
    assert best.memory.varied_bytes is None
    asked = len(tracer.requests)

    planner.figures.vary(best.candidate)

    found = planner.estimate(best.candidate).memory
    assert found is not None
    assert found.varied_bytes == VARIED_BYTES
    assert found.most_bytes == round(found.device_bytes * (1 + found.error)) + VARIED_BYTES
    assert found.device_bytes == best.memory.device_bytes
    other = planner.estimate(second.candidate).memory
    assert other is not None
    assert other.varied_bytes is None
    request = tracer.requests[asked]
    assert (len(tracer.requests), request.layers, request.varied) == (asked + 1, LAYERS, True)
    # Rows one after another, or end to end.
    assert int(str(request.plan.args["max_length"])) * int(
        str(request.plan.args["per_device_train_batch_size"])
    ) == TOKENS * int(str(best.candidate["per_device_train_batch_size"]))


def test_rows_of_one_length_vary_nothing_and_what_cannot_be_traced_is_not_known(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    equal = planner_of(
        problem_of(attention="sdpa", liger="off", precision="float32"), tracer, tmp_path / "equal", 10 * GIB
    )
    equal.explore()
    asked, best = len(tracer.requests), equal.ranked()[0]
    equal.figures.vary(best.candidate)
    memory = equal.estimate(best.candidate).memory
    assert memory is not None
    assert (memory.varied_bytes, len(tracer.requests)) == (0, asked)

    lost = planner_of(
        problem_of({TOKENS: 8, 64: 8}, attention="sdpa", liger="off", precision="float32"),
        LosingTracer(),
        tmp_path / "lost",
        10 * GIB,
    )
    lost.figures.vary(best.candidate)
    assert lost.estimate(best.candidate).memory is None


def test_candidates_that_differ_in_the_allocator_share_traces_and_reserve_what_its_replay_reserves(
    tmp_path: Path,
) -> None:
    tracer = AnalyticTracer()
    here = problem_of()
    planner = planner_of(here, tracer, tmp_path, 10 * GIB)
    planner.trace([here.baseline])
    traced = len(tracer.requests)
    fixed, growing = here.baseline, here.baseline.but(allocator="expandable_segments")
    planner.trace([growing])
    memories = [planner.estimate(candidate).memory for candidate in (fixed, growing)]

    assert len(tracer.requests) == traced
    assert memories[0] is not None
    assert memories[1] is not None
    assert memories[0].peak_bytes == memories[1].peak_bytes
    unused = [memory.breakdown["fragmentation"] for memory in memories if memory is not None]
    assert unused[1] == pytest.approx(unused[0] / 5, rel=1e-6)
    assert planner.estimate(fixed).tokens_per_second == planner.estimate(growing).tokens_per_second


def test_varied_lengths_are_replayed_with_the_allocator_of_the_candidate(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    here = problem_of({TOKENS: 4, 100: 4})
    planner = planner_of(here, tracer, tmp_path, 10 * GIB)
    growing = here.baseline.but(allocator="expandable_segments")
    planner.figures.vary(growing)
    assert [request.allocator.expandable_segments for request in tracer.requests if request.varied] == [True]
