"""Traces of a plan: what is told meanwhile, and what the answer stands on in the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.app.tracking import Tracking
from autotune.core.estimate import Origin, answers, distinct, need
from autotune.core.events import Event, Noted, Ranked, StageStarted, Tracing, ignore
from autotune.inspection.gpus import find_gpu
from autotune.planning.candidates import legal_candidates
from autotune.planning.changes import smallest_changes
from autotune.planning.planner import Planner
from autotune.planning.target import Accelerator
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.store import Traces
from autotune.space import Wishes
from autotune.trainers.problem import TrainerProblem
from autotune.units import GIB
from tests.planning.stand_in import AnalyticTracer
from tests.settings import GPU, problem, setting, workload

TOP = 20


def whole_space() -> TrainerProblem:
    return problem(setting(machine=GPU, of=workload(lengths={1024: 8})), Wishes({"max_length": 1024}))


def planner_of(problem: TrainerProblem, folder: Path, budget_bytes: int) -> tuple[Planner, Traces]:
    traces = Traces(AnalyticTracer(), Cache(folder), "model", {})
    target = Accelerator(find_gpu("H100-80GB"), budget_bytes)
    return Planner(problem, target, traces, ("full",) * 16, legal_candidates(problem)), traces


def test_all_that_an_answer_consists_of_is_traced_and_was_preceded_by_provisional_rankings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So few that the best are composed at first.
    monkeypatch.setattr("autotune.app.tracking._EXPLORED", 1)
    here, told = whole_space(), list[Event]()
    first_planner, _ = planner_of(here, tmp_path / "first", 8 * GIB)
    first_planner.explore(1)
    assert Origin.COMPOSED in {estimate.origin for estimate in distinct(first_planner.ranked(), TOP)}
    planner, traces = planner_of(here, tmp_path, 8 * GIB)
    Tracking(told.append).trace(here, planner, traces, TOP)

    ranked, baseline = planner.ranked(), planner.estimate(here.baseline)
    shown = [baseline, *distinct(answers(ranked), TOP)]
    shown += [change.instead for change in smallest_changes(shown, answers(ranked))]
    assert len(shown) > TOP
    # None that was not traced promises more than what is shown.
    rates = [found.tokens_per_second or 0.0 for found in shown[1:]]
    further = [found.tokens_per_second or 0.0 for found in ranked if found.fits and found.origin is not Origin.TRACED]
    assert max(further) < 1.02 * max(rates)
    assert Origin.COMPOSED in {estimate.origin for estimate in ranked}
    assert {estimate.origin for estimate in shown} == {Origin.TRACED}

    stage, first, *others = told
    assert stage == StageStarted("Tracing training steps with no GPU")
    assert isinstance(first, Ranked)
    assert first.baseline == here.baseline
    assert others
    rankings = [event for event in told if isinstance(event, Ranked)]
    assert all(found.origin is Origin.TRACED for event in rankings for found in event.best)


def test_where_nothing_fits_what_needs_the_least_is_traced(tmp_path: Path) -> None:
    here = whole_space()
    planner, traces = planner_of(here, tmp_path, 1)
    Tracking(ignore).trace(here, planner, traces, TOP)
    ranked = planner.ranked()
    shown = distinct(answers(ranked), TOP)
    assert {estimate.origin for estimate in shown} == {Origin.TRACED}
    assert need(shown[0]) == pytest.approx(need(ranked[0]), rel=0.01)


def test_counts_are_those_of_all_calls_and_the_time_follows_from_the_pace(tmp_path: Path) -> None:
    here, told, now = whole_space(), list[Event](), [100.0]
    planner, traces = planner_of(here, tmp_path, 8 * GIB)
    tracking = Tracking(told.append, lambda: now[0])
    tracking.trace(here, planner, traces, TOP)
    known = traces.count
    planner.to_come, now[0] = 30, 100.0 + known + 5
    tracking.hear(Tracing(5, 15, 1.0))
    assert told[-1] == Tracing(known + 5, known + 15 + 30, remaining_seconds=40.0)


def test_stages_of_single_calls_are_not_told_and_all_else_is() -> None:
    told = list[Event]()
    tracking = Tracking(told.append)
    for event in (StageStarted("Tracing 5 training steps with no GPU"), Noted("a note"), Tracing(1, 5, 2.0)):
        tracking.hear(event)
    assert told == [Noted("a note"), Tracing(1, 5, 2.0)]
