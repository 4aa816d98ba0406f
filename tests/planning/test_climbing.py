"""What a sample of the space lacks is climbed to from its best candidates, one choice after another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate, Origin
from autotune.core.protocol import TraceReply, TraceRequest
from autotune.core.traced import GpuFigures
from autotune.inspection.gpus import find_gpu
from autotune.planning.candidates import legal_candidates
from autotune.planning.climbing import climb
from autotune.planning.planner import Planner
from autotune.planning.target import Accelerator
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.store import Traces
from autotune.probing.tracing import Traced
from autotune.space import Wishes
from autotune.trainers.problem import TrainerProblem
from autotune.units import GIB
from tests.planning.stand_in import AnalyticTracer
from tests.settings import GPU, problem, setting, workload

LITTLE, ENOUGH = 1, 70 * GIB
TRADING = ("activation_offloading", "gradient_checkpointing")
"""Techniques that trade time for memory in this test, each in both figures."""
SLOWER = 1.3


class TradingTracer(AnalyticTracer):
    """Answers by a formula in which what needs less memory takes time."""

    def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
        """Answer requests."""
        answers = super().__call__(requests)
        return [_slowed(answer, traded(request)) for request, answer in zip(requests, answers, strict=True)]


def traded(request: TraceRequest) -> int:
    """Return how many techniques of a request trade time for memory."""
    return sum(bool(request.plan.args.get(name)) for name in TRADING)


def _slowed(answer: Traced, times: int) -> Traced:
    assert isinstance(answer, TraceReply)
    return replace(answer, gpus=tuple(_slowed_on(gpu, SLOWER**times) for gpu in answer.gpus))


def _slowed_on(gpu: GpuFigures, slower: float) -> GpuFigures:
    return replace(gpu, times=tuple(time and replace(time, seconds=slower * time.seconds) for time in gpu.times))


@pytest.fixture(autouse=True)
def _less_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.planning.stand_in.kept_by_layer", lambda request: 60_000.0 / 3 ** traded(request))


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every space be one that is sampled."""
    monkeypatch.setattr("autotune.planning.candidates.MOST_COMBINATIONS", 0)


def space() -> TrainerProblem:
    """Return the shipped space, as far as the formula knows its techniques."""
    fixed: dict[str, str | int] = {"max_length": 1024, "attention": "sdpa", "liger": "off", "hub_kernels": "off"}
    return problem(setting(machine=GPU, of=workload(lengths={1024: 8})), Wishes(fixed))


def planner_of(of: TrainerProblem, candidates: Sequence[Candidate], folder: Path, budget_bytes: int) -> Planner:
    """Return a planner of a part of the space that has explored it."""
    traces = Traces(TradingTracer(), Cache(folder), "model", {})
    planner = Planner(of, Accelerator(find_gpu("H100-80GB"), budget_bytes), traces, ("full",) * 16, candidates)
    planner.explore()
    planner.refine(lambda ranked: ranked[:1], 4)
    return planner


def beside(centre: Candidate, every: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates with at most one choice that is not the centre's."""
    return [candidate for candidate in every if len(candidate.differences(centre)) <= 1]


def speed(estimate: Estimate) -> float:
    """Return tokens per second."""
    assert estimate.tokens_per_second is not None
    return estimate.tokens_per_second


def need(estimate: Estimate) -> int:
    """Return bytes."""
    assert estimate.memory is not None
    return estimate.memory.device_bytes


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize("budget_bytes", [LITTLE, ENOUGH], ids=["nothing fits", "much fits"])
def test_the_best_of_the_space_is_climbed_to_from_a_small_part_of_it(tmp_path: Path, budget_bytes: int) -> None:
    here = space()
    every = legal_candidates(here)
    best = planner_of(here, every, tmp_path / "whole", budget_bytes).traced(1)[0]
    # What is best takes two changes of this candidate, which has the wrong choice of each of both techniques.
    far = here.normal(here.baseline.but(**dict.fromkeys(TRADING, "on" if best.fits else "off")))
    few = beside(far, every)
    assert len(few) * 50 < len(every)

    planner = planner_of(here, few, tmp_path / "few", budget_bytes)
    before = planner.traced(1)[0]
    added = climb(here, planner)
    found = planner.traced(1)[0]
    assert found.candidate in added
    assert found.fits == best.fits == (budget_bytes == ENOUGH)
    if best.fits:
        assert speed(before) < speed(best) * 0.99
        assert speed(found) == pytest.approx(speed(best), rel=0.01)
    else:
        assert need(before) > need(best) * 1.01
        assert need(found) == pytest.approx(need(best), rel=0.01)


@pytest.mark.usefixtures("sampled")
def test_no_more_is_climbed_once_the_time_is_over(tmp_path: Path) -> None:
    here = space()
    planner = planner_of(here, beside(here.baseline, legal_candidates(here)), tmp_path, LITTLE)
    assert climb(here, planner, goes_on=lambda: False) == ()


def test_a_space_that_is_planned_whole_is_not_climbed(tmp_path: Path) -> None:
    here = space()
    few = beside(here.baseline, legal_candidates(here))
    planner = planner_of(here, few, tmp_path, LITTLE)
    assert climb(here, planner) == ()
    assert planner.candidates == tuple(few)


def test_what_is_not_among_the_candidates_is_traced_if_it_is_asked_for_and_is_not_ranked(tmp_path: Path) -> None:
    here = space()
    few = beside(here.baseline, legal_candidates(here))
    planner = planner_of(here, few, tmp_path, ENOUGH)
    other = here.normal(here.baseline.but(gradient_checkpointing="off", activation_offloading="on", packing="bfd"))
    assert other not in few
    assert planner.estimate(other).origin is not Origin.TRACED
    planner.trace([other])
    assert planner.estimate(other).origin is Origin.TRACED
    assert other not in {found.candidate for found in planner.ranked()}
    # A wider planner goes on from there.
    wide = planner.widened(here, [])
    assert [found.candidate for found in wide.ranked()] == [found.candidate for found in planner.ranked()]
