"""The search of a plan: reported progress, and the final traces of the best candidates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.app.tracking import Tracking
from autotune.core.candidate import Candidate
from autotune.core.documents.estimate import Estimate, MemoryEstimate, Origin, distinct, memory_key, smallest_changes
from autotune.core.events import Event, Noted, Ranked, Tracing, ignore
from autotune.planning.evaluator import Evaluator
from autotune.units import GIB, format_bytes
from tests.planning.stand_in import AnalyticTracer, LosingTracer
from tests.planning.test_evaluator import evaluator_of, problem_of

TOP = 20


def new_evaluator(folder: Path, budget_bytes: int) -> Evaluator:
    return evaluator_of(problem_of(), AnalyticTracer(), folder, budget_bytes)


def test_all_that_a_plan_shows_is_traced_and_was_preceded_by_provisional_rankings(tmp_path: Path) -> None:
    told = list[Event]()
    evaluator = new_evaluator(tmp_path, 8 * GIB)
    baseline = evaluator.problem.baseline
    Tracking(told.append).search(evaluator)

    ranked = evaluator.ranked()
    shown = [evaluator.estimate(baseline), *distinct(ranked, TOP)]
    assert {estimate.origin for estimate in shown if not estimate.reason} == {Origin.TRACED}
    assert shown[1].fits
    for change in smallest_changes(shown, ranked):
        assert change.instead.fits

    first, *others = told
    assert isinstance(first, Ranked)
    assert [found.candidate for found in first.best] == [baseline]
    rankings = [event for event in others if isinstance(event, Ranked)]
    assert len(rankings) > 2
    assert all(found.origin is Origin.TRACED for event in rankings for found in event.best)
    assert rankings[-1].best[0] == ranked[0]


def test_shares_of_vllm_that_differ_in_what_vllm_holds_alone_are_rows_of_their_own() -> None:
    found = [
        Estimate(
            Candidate({"share": size}), Origin.TRACED, MemoryEstimate(GIB, GIB, 0, {}, 0, None, 0.1, vllm_bytes=size)
        )
        for size in (GIB, 2 * GIB, 5 * GIB)
    ]
    assert distinct(found, TOP) == tuple(found)


def test_of_candidates_that_hardly_differ_in_speed_those_are_shown_that_need_less_memory() -> None:
    def traced(name: int, size: int, rate: float) -> Estimate:
        memory = MemoryEstimate(size, size, 0, {}, 0, None, 0.1)
        return Estimate(Candidate({"name": name}), Origin.TRACED, memory, rate, spare_bytes=1)

    first, alike = traced(1, 1000 * GIB, 1000.0), traced(2, 1015 * GIB, 995.0)
    slower, larger, smaller = traced(3, 1000 * GIB, 980.0), traced(4, 1040 * GIB, 1000.0), traced(5, 960 * GIB, 995.0)
    does_not_fit = replace(alike, spare_bytes=-1)
    found = distinct([first, alike, slower, larger, smaller, does_not_fit], TOP)
    assert found == (first, slower, smaller, does_not_fit)


def test_a_search_of_which_every_trace_fails_for_the_same_reason_ends_early(tmp_path: Path) -> None:
    evaluator = evaluator_of(problem_of(), LosingTracer(), tmp_path, 8 * GIB)
    Tracking(ignore).search(evaluator)
    assert evaluator.unknown_reason == "a job ended with signal 9"
    assert len(evaluator.candidates) <= 20 < evaluator.problem.size


@pytest.mark.parametrize(
    ("budget_bytes", "named"),
    [
        (8 * GIB, "The best of {} traced candidates so far on {} is predicted to need {} of 8.00 GiB: "),
        (1, "None of {} traced candidates so far fits {}: the least needs {} of 1 B: "),
    ],
)
def test_an_interrupted_search_names_the_best_so_far_and_that_its_traces_are_kept(
    budget_bytes: int, named: str, tmp_path: Path
) -> None:
    told = list[Event]()

    def interrupt(event: Event) -> None:
        told.append(event)
        if isinstance(event, Ranked) and len(event.best) > 1:
            raise KeyboardInterrupt

    evaluator = new_evaluator(tmp_path, budget_bytes)
    with pytest.raises(KeyboardInterrupt), Tracking(interrupt) as tracking:
        tracking.search(evaluator)
    best, kept = (event.text for event in told if isinstance(event, Noted))
    found = evaluator.ranked()[0]
    assert found.memory is not None
    device, needs = evaluator.problem.setting.machine.device.name, format_bytes(found.memory.device_bytes)
    assert best.startswith(named.format(len(evaluator.candidates), device, needs))
    assert kept == "Finished traces are cached: the same command continues from there."


def test_where_nothing_fits_what_needs_the_least_is_found(tmp_path: Path) -> None:
    evaluator = new_evaluator(tmp_path, 1)
    Tracking(ignore).search(evaluator)
    found = evaluator.ranked()[0]
    (least,) = evaluator.run([found.candidate.but(per_device_train_batch_size=1, gradient_checkpointing="on")])
    assert memory_key(found) <= memory_key(least)


def test_counts_are_those_of_all_calls_and_the_time_follows_from_the_pace(tmp_path: Path) -> None:
    told, now = list[Event](), [100.0]
    evaluator = new_evaluator(tmp_path, 8 * GIB)
    tracking = Tracking(told.append, lambda: now[0])
    tracking.search(evaluator)
    known = evaluator.traces.count
    now[0] = 100.0 + known + 5
    tracking.pass_on(Tracing(5, 15, 1.0))
    assert told[-1] == Tracing(known + 5, known + 15, remaining_seconds=10.0)


def test_each_search_that_shares_traces_is_counted_from_its_own_start(tmp_path: Path) -> None:
    told, now = list[Event](), [100.0]
    evaluator = new_evaluator(tmp_path, 8 * GIB)
    tracking = Tracking(told.append, lambda: now[0])
    tracking.search(evaluator)
    now[0] = 200.0
    tracking.search(Evaluator(evaluator.problem, evaluator.device, 9 * GIB, evaluator.traces))
    before = evaluator.traces.count
    now[0] = 205.0
    tracking.pass_on(Tracing(5, 15, 1.0))
    (further,) = (event.done - 5 for event in told[-1:] if isinstance(event, Tracing))
    assert further < before / 2
    assert told[-1] == Tracing(5 + further, 15 + further, remaining_seconds=10.0 * 5 / (5 + further))


def test_what_is_still_to_be_traced_is_estimated_while_a_search_runs(tmp_path: Path) -> None:
    told, evaluator = list[Event](), new_evaluator(tmp_path, 8 * GIB)
    tracking = Tracking(told.append)

    def pass_on(event: Event) -> None:
        told.append(event)
        if isinstance(event, Ranked):
            tracking.pass_on(Tracing(0, 0))

    tracking = Tracking(pass_on)
    tracking.search(evaluator)
    counts = [event for event in told if isinstance(event, Tracing)]
    assert counts[0].expected > counts[0].done


def test_before_a_search_events_are_passed_on_as_they_are() -> None:
    told = list[Event]()
    tracking = Tracking(told.append)
    for event in (Noted("a note"), Tracing(1, 5, 2.0)):
        tracking.pass_on(event)
    assert told == [Noted("a note"), Tracing(1, 5, 2.0)]
