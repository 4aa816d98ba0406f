"""Estimates of the planner become predictions for the search, which probes correct."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import pytest

from autotune.app.arguments import ProbeArguments
from autotune.app.predictions import Predictions, _measure, note_on_traced, predictions_of, trace_before_search
from autotune.core.candidate import Candidate
from autotune.core.documents.estimate import Estimate, MemoryEstimate, Origin, memory_key
from autotune.core.events import Event, Noted, ignore
from autotune.core.gpu import GpuSpeeds
from autotune.core.jobs.protocol import OperatorsRequest
from autotune.core.machine import Machine
from autotune.core.measurement import Measurement
from autotune.core.status import ProbeStatus
from autotune.errors import ProbeServerError
from autotune.planning.predictor import PlannedPredictor
from autotune.planning.tracing.cache import Cache
from autotune.probing import JobServer
from autotune.probing.tracing import ServerTracer, Traced
from autotune.trainers.problem import TrainerProblem
from autotune.units import GIB, MIB
from tests.planning.stand_in import UNTRACEABLE, AnalyticTracer
from tests.settings import GPU, machine_with, problem, setting, workload

LIMIT_BYTES = 10 * GIB
SMALL, MEDIUM, LARGE, UNKNOWN = (Candidate({"batch": rows}) for rows in (1, 2, 4, 8))
TINY = SMALL.but(checkpointing="on")
SIZES = {TINY: 2 * GIB, SMALL: 4 * GIB, MEDIUM: 8 * GIB, LARGE: 16 * GIB}


def an_estimate(candidate: Candidate, origin: Origin = Origin.TRACED, *, on_cpu: bool = False) -> Estimate:
    """An estimate of memory with a context of 512 MiB in it, and a rate that grows with the batch."""
    if candidate not in SIZES or origin is Origin.UNKNOWN:
        return Estimate(candidate, Origin.UNKNOWN, reason="it cannot be traced")
    size = SIZES[candidate] - 512 * MIB
    memory = MemoryEstimate(size, None if on_cpu else size, 512 * MIB, {}, 0, 1.0, 0.10)
    return Estimate(candidate, origin, memory, 1000.0 * int(candidate["batch"]), LIMIT_BYTES - SIZES[candidate])


@dataclass
class Estimates:
    """Estimates by hand."""

    origins: dict[Candidate, Origin] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = (SMALL, MEDIUM, LARGE, UNKNOWN)
    failing: bool = False
    on_cpu: bool = False
    budget_bytes: int = LIMIT_BYTES

    def estimate(self, candidate: Candidate) -> Estimate:
        return an_estimate(candidate, self.origins.get(candidate, Origin.TRACED), on_cpu=self.on_cpu)

    def run(self, candidates: Sequence[Candidate]) -> list[Estimate]:
        if self.failing:
            raise ProbeServerError("the server is gone")
        self.origins.update(dict.fromkeys(candidates, Origin.TRACED))
        return [self.estimate(candidate) for candidate in candidates]

    def least(self, goes_on: Callable[[], bool]) -> Estimate | None:
        return self.run(self.candidates[:1])[0]


def predictor_of(estimates: Estimates) -> PlannedPredictor:
    return PlannedPredictor(estimates, estimates.least)  # type: ignore[arg-type]


def shown(
    candidate: Candidate, reserved_bytes: int | None, rate: float, device_bytes: int | None = None
) -> tuple[Candidate, Measurement]:
    measurement = Measurement(
        ProbeStatus.OK,
        reserved_bytes=reserved_bytes,
        device_bytes=device_bytes,
        peak_bytes=GIB,
        tokens_per_second=rate,
    )
    return candidate, measurement


def test_what_was_traced_is_predicted_and_nothing_is_predicted_of_the_rest() -> None:
    predictor = predictor_of(Estimates({MEDIUM: Origin.UNKNOWN}))
    small = predictor.predict(SMALL)
    assert small is not None
    assert (small.error, small.need_bytes) == (0.10, SIZES[SMALL])
    assert predictor.predict(MEDIUM) is None
    assert predictor.predict(UNKNOWN) is None


def test_a_candidate_is_predicted_once_it_is_traced() -> None:
    predictor = predictor_of(Estimates({LARGE: Origin.UNKNOWN}))
    guess, sure = predictor.predict(LARGE), predictor.trace(LARGE)
    assert guess is None
    assert sure is not None


def test_the_candidate_that_needs_the_least_is_traced() -> None:
    predictor = predictor_of(Estimates({SMALL: Origin.UNKNOWN}))
    assert predictor.least() == SMALL
    assert predictor.predict(SMALL) is not None
    assert predictor_of(Estimates(failing=True)).least() == SMALL


def test_tracing_that_fails_ends_no_search_and_is_told() -> None:
    predictor = predictor_of(Estimates({LARGE: Origin.UNKNOWN}, failing=True))
    assert predictor.trace(LARGE) is None
    assert predictor.notes() == ("Some predictions are not traced: the server is gone",)


def test_probes_that_fit_leave_memory_and_speed_as_traced() -> None:
    predictor = predictor_of(Estimates())
    before = predictor.predict(LARGE)
    for candidate in (SMALL, MEDIUM):
        predictor.learn(*shown(candidate, SIZES[candidate] + 120 * MIB, 500.0 * int(candidate["batch"])))
    assert predictor.predict(LARGE) == before
    assert predictor.notes() == ()


def test_what_ran_out_of_memory_needs_more_than_the_limit_and_what_needs_less_still_fits() -> None:
    predictor = predictor_of(Estimates())
    before = predictor.predict(LARGE)
    predictor.learn(MEDIUM, Measurement(ProbeStatus.OUT_OF_MEMORY))
    small, medium, large = map(predictor.predict, (SMALL, MEDIUM, LARGE))
    assert medium is not None
    assert medium.need_bytes > LIMIT_BYTES
    assert predictor.notes() == ("Memory predictions were raised by 25 %, since 1 candidate ran out of memory.",)
    # The raise ranks, and rules out exactly as much as before.
    assert small is not None
    assert large is not None
    assert before is not None
    assert large.need_bytes > before.need_bytes
    assert large.need_bytes * (1 - large.error) == pytest.approx(before.need_bytes * (1 - before.error))


def test_one_that_ran_out_does_not_contradict_those_that_fitted() -> None:
    predictor = predictor_of(Estimates())
    predictor.learn(*shown(MEDIUM, SIZES[MEDIUM] - 512 * MIB, 1.0))
    predictor.learn(SMALL, Measurement(ProbeStatus.OUT_OF_MEMORY))
    small, medium = predictor.predict(SMALL), predictor.predict(MEDIUM)
    assert small is not None
    assert medium is not None
    assert small.need_bytes > LIMIT_BYTES
    assert medium.need_bytes <= LIMIT_BYTES + 1


def test_another_failure_raises_nothing() -> None:
    predictor = predictor_of(Estimates())
    predictor.learn(MEDIUM, Measurement(ProbeStatus.HOST_OUT_OF_MEMORY))
    predictor.learn(SMALL, Measurement(ProbeStatus.CRASHED))
    assert predictor.notes() == ()


def test_what_fitted_on_a_cpu_needs_no_more_than_the_limit() -> None:
    predictor = predictor_of(Estimates(on_cpu=True))
    predictor.learn(*shown(LARGE, None, 1.0))
    large = predictor.predict(LARGE)
    assert large is not None
    assert large.need_bytes == LIMIT_BYTES


def test_what_a_process_holds_beside_tensors_ranks_and_rules_nothing_out() -> None:
    large = predictor_of(Estimates(on_cpu=True)).predict(LARGE)
    assert large is not None
    tensor_bytes = SIZES[LARGE] - 512 * MIB
    assert large.need_bytes == SIZES[LARGE]
    assert large.over(round(0.97 * tensor_bytes) - 2)
    assert not large.over(round(0.97 * tensor_bytes) + 2)


def test_a_time_limit_ends_the_traces_before_a_search(
    tracer: ServerTracer, monkeypatch: pytest.MonkeyPatch, job_server: JobServer
) -> None:
    left = list[float]()

    def search(*_: object, **__: object) -> Predictions:
        left.append(tracer.left_seconds)
        return Predictions()

    monkeypatch.setattr("autotune.app.predictions.trace_before_search", search)
    for timeout in (None, 100.0):
        asked = ProbeArguments("model", "rows.jsonl", timeout=timeout)
        predictions_of(asked, problem_of(), LIMIT_BYTES, job_server, tracer)
    assert left[0] == inf
    # Three times a tenth of it.
    assert 20 < left[1] <= 30


def test_operators_are_measured_in_the_time_that_is_left_for_traces(
    tracer: ServerTracer, monkeypatch: pytest.MonkeyPatch, job_server: JobServer
) -> None:
    asked = list[float]()

    def measured(_server: object, request: OperatorsRequest, *_: object) -> dict[str, float | None]:
        asked.append(request.seconds)
        return {}

    monkeypatch.setattr("autotune.app.predictions.measure_operators", measured)
    for seconds in (None, 3.0, 0.0):
        with tracer.time_limit(seconds):
            assert _measure("cpu", LIMIT_BYTES, job_server, tracer, ["a call"]) == {}
    without_limit, limited = asked
    assert limited < 3.0 < without_limit


class FailingTracer(AnalyticTracer):
    """A tracer whose processes cannot be started."""

    def __call__(self, requests: object) -> Iterable[Traced]:
        raise ProbeServerError("no process can be started")


def unknown_speeds(_: GpuSpeeds | None) -> GpuSpeeds:
    """A CPU that cannot be measured."""
    raise ProbeServerError("no process can be started")


LISTED = machine_with(GPU, name="NVIDIA H100 80GB HBM3")


def problem_of(machine: Machine = GPU, **fixed: str | int) -> TrainerProblem:
    return problem(setting(machine=machine, of=workload(lengths={1024: 8})), {"max_length": 1024, **fixed})


def traced(
    folder: Path,
    tracer: AnalyticTracer,
    of: TrainerProblem | None = None,
    *,
    limit_bytes: int = LIMIT_BYTES,
    speeds: Callable[[GpuSpeeds | None], GpuSpeeds] = unknown_speeds,
    seconds: float = 600.0,
    **more: Any,
) -> Predictions:
    """Return the predictions of a search whose traces are kept in a folder."""
    asked = of or problem_of(), limit_bytes, tracer, Cache(folder), speeds, seconds
    return trace_before_search(*asked, **{"listener": ignore, **more})


def test_what_keeps_everything_from_being_traced_is_told_and_ends_nothing(tmp_path: Path) -> None:
    heard: list[Event] = []
    predictions = traced(tmp_path, FailingTracer(), listener=heard.append)
    assert predictions.predictor is None
    assert predictions.notes() == ("The search ran without predictions: no process can be started",)
    assert heard == [Noted("Nothing is predicted: no process can be started")]


@pytest.mark.parametrize(
    ("count", "fitting", "sentence"),
    [
        (1, 0, "Traced 1 candidate in 30 s: 0 predicted to fit."),
        (20, 20, "Traced 20 candidates in 30 s: 20 predicted to fit."),
        (2_400, 1_300, "Traced 2,400 candidates in 30 s: 1,300 predicted to fit."),
        (0, 0, "No trace was completed in 30 s."),
    ],
)
def test_the_note_on_what_was_traced_agrees_in_number(count: int, fitting: int, sentence: str) -> None:
    assert note_on_traced(count, fitting, 30.0) == sentence


def test_tracing_ahead_stops_when_its_time_is_up(tmp_path: Path) -> None:
    hurried, patient = AnalyticTracer(), AnalyticTracer()
    traced(tmp_path / "a", hurried, seconds=0.0)
    traced(tmp_path / "b", patient)
    assert len(hurried.requests) == 0
    assert len(patient.requests) > 10


@pytest.mark.parametrize(
    ("limit_bytes", "seconds", "traces"),
    [
        pytest.param(LIMIT_BYTES, 1.0, 1, id="all fit"),
        pytest.param(LIMIT_BYTES, 2.0, 5, id="all fit, and there is time"),
        pytest.param(552 * MIB, 1.0, 5, id="the default does not fit"),
        pytest.param(552 * MIB, 2.0, 5, id="another one fits"),
        pytest.param(MIB, 2.0, 9, id="none fits"),
    ],
)
def test_tracing_ahead_takes_up_to_three_times_as_long_until_something_may_fit(
    limit_bytes: int, seconds: float, traces: int, tmp_path: Path
) -> None:
    tracer = AnalyticTracer()

    def clock() -> float:
        """Each trace takes a second; one candidate is traced first, then four at a time."""
        return float(len(tracer.requests))

    traced(tmp_path, tracer, limit_bytes=limit_bytes, seconds=seconds, clock=clock)
    # A candidate with packed rows that are not all full has a second trace, of its mean row.
    assert traces <= len(tracer.requests) <= traces + 1


def test_what_needs_the_least_is_searched_for_once_it_is_asked_for(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    predictions = traced(tmp_path, tracer)
    assert predictions.predictor is not None
    assert predictions.evaluator is not None
    smallest = predictions.predictor.least()
    assert smallest is not None
    count, needs = len(tracer.requests), [memory_key(found) for found in predictions.evaluator.ranked()]
    assert memory_key(predictions.evaluator.estimate(smallest)) == min(needs)
    assert predictions.predictor.least() == smallest
    assert len(tracer.requests) == count


def test_what_needs_the_least_is_not_known_where_time_ends_the_search_for_it(tmp_path: Path) -> None:
    tracer = AnalyticTracer()

    def clock() -> float:
        return float(len(tracer.requests))

    predictions = traced(tmp_path, tracer, seconds=1.0, clock=clock)
    assert predictions.predictor is not None
    before = len(tracer.requests)
    assert predictions.predictor.least(lambda: False) is None
    assert len(tracer.requests) == before
    assert predictions.predictor.least(lambda: len(tracer.requests) == before) is None
    assert before < len(tracer.requests) <= before + 5
    assert predictions.predictor.least() is not None


def test_ways_that_cannot_be_traced_are_told_once(tmp_path: Path) -> None:
    predictions = traced(tmp_path, AnalyticTracer(), problem_of(machine=LISTED, attention=UNTRACEABLE))
    assert predictions.predictor is not None
    (note,) = predictions.notes()
    assert f"could not be traced and were not predicted: {UNTRACEABLE} is not supported" in note


def test_the_memory_of_candidates_through_a_step_is_that_of_their_traces(tmp_path: Path) -> None:
    here = problem_of()
    predictions = traced(tmp_path, AnalyticTracer(), here, seconds=0.0)
    assert predictions.timelines([here.baseline], traces=False) == {}
    found = predictions.timelines([here.baseline], traces=True)[here.baseline]
    assert found.followed
    assert predictions.evaluator is not None
    memory = predictions.evaluator.estimate(here.baseline).memory
    assert memory is not None
    assert found.need_bytes == memory.device_bytes
    assert Predictions().timelines([here.baseline], traces=True) == {}


def test_traces_that_are_not_kept_between_runs_are_noted(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    notes = traced(tmp_path / "file" / "cache", AnalyticTracer(), problem_of(machine=LISTED)).notes()
    assert any(note.startswith("Traces are not cached: ") and "cannot be written" in note for note in notes)
