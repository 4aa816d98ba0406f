"""Runs of one study may differ in their last resorts: they compare and adopt each other's candidates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.app import search
from autotune.app.arguments import ProbeArguments
from autotune.app.offload import as_searched, notes_on_untried
from autotune.app.output import Output
from autotune.app.predictions import Predictions
from autotune.app.problem import with_last_resorts
from autotune.app.search import Run, run_search, storage_of
from autotune.core.events import ignore
from autotune.core.jobs.protocol import ProbeRequest
from autotune.core.jobs.traced import TraceRequest
from autotune.core.measurement import Measurement
from autotune.core.status import ProbeStatus
from autotune.probing import JobServer
from autotune.probing.tracing import Traced
from autotune.study.problem import Purpose, Record, SearchOutcome
from autotune.trainers.problem import TrainerProblem
from tests.app.replaying import no_server, replay
from tests.app.test_last_resort import ENOUGH, TIGHT, OffloadingTracer, PagingTracer, here, ran_out
from tests.app.test_outcome import outcome_of
from tests.app.test_predicted import traced


class SlowTracer(PagingTracer):
    """Takes ten seconds for each call, by a clock of its own."""

    now = 0.0

    def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
        self.now += 10.0
        return super().__call__(requests)


def widened() -> TrainerProblem:
    """Return the same space with last resorts."""
    return with_last_resorts(here())


def searched(of: TrainerProblem) -> Run:
    """Return a search of a problem that another run or another worker has begun."""
    args = ProbeArguments(trainer="sft", device="cpu", resume=True)
    return Run(args, of, no_server(), Output(Path("out")), TIGHT)


def test_runs_that_trace_more_or_less_of_a_study_may_resume_and_join_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predictions(seconds: float, tracer: SlowTracer, folder: Path) -> Predictions:
        monkeypatch.setattr("autotune.app.predictions.time", SimpleNamespace(monotonic=lambda: tracer.now))
        return traced(folder, tracer, here(), limit_bytes=TIGHT, seconds=seconds)

    cut_short, resumed = (predictions(seconds, SlowTracer(), tmp_path / "traces") for seconds in (15.0, 1e6))
    for found in (cut_short, resumed):
        assert found.evaluator is not None
        assert found.evaluator.problem.choices == here().choices
        assert not any("offload" in note for note in found.notes())
    study = storage_of(searched(here()))
    assert study.fingerprint["choices of offload"] == "none, optimizer, parameters, both"
    assert storage_of(searched(widened())).fingerprint == study.fingerprint


def test_a_run_without_last_resorts_takes_those_of_its_study_as_its_own(tmp_path: Path) -> None:
    narrow, wide = here(), widened()
    candidate = wide.normal(wide.baseline.but(sharding="zero2", offload="optimizer", optimizer="adamw_torch"))
    assert (narrow.normal(candidate), narrow.illegal(candidate)) == (candidate, None)
    assert narrow.identity(candidate) == wide.identity(candidate)
    predictions = traced(tmp_path, OffloadingTracer(), narrow, limit_bytes=ENOUGH)
    assert predictions.predictor is not None
    assert predictions.predictor.predict(candidate) is None
    assert predictions.predictor.trace(candidate) is not None


def test_runs_with_last_resorts_and_without_go_on_with_one_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, wide = here(), widened()
    offloaded = wide.normal(wide.baseline.but(sharding="zero2", offload="optimizer", optimizer="adamw_torch"))
    wide = replace(wide, space=replace(wide.space, recipes=(offloaded,)))
    sharded: list[bool] = []

    def probe(server: JobServer, request: ProbeRequest, folder: Path, timeout_seconds: float | None) -> Measurement:
        sharded.append("deepspeed" in request.plan.args)
        if sharded == [False, True]:
            raise KeyboardInterrupt
        return replay(server, request, folder, timeout_seconds)

    monkeypatch.setattr(search, "run_probe", probe)

    def further(of: TrainerProblem, trials: int) -> SearchOutcome:
        run = searched(of)
        return run_search(
            replace(run, output=Output(tmp_path), arguments=replace(run.arguments, trials=trials)), ignore
        )

    assert further(wide, 3).interrupted
    repeated = next(record for record in further(narrow, 3).records if record.candidate == offloaded)
    assert repeated.measurement.ok
    assert sharded[:3] == [False, True, True]
    assert sum(record.probed for record in further(wide, 6).records) == 6


def test_what_a_study_offloaded_is_handed_over_by_a_run_that_did_not() -> None:
    narrow, wide = here(), widened()
    assert as_searched(narrow, ran_out(narrow)) is narrow
    offloaded = Record(
        1, narrow.baseline.but(sharding="zero2", offload="optimizer"), Purpose.SEARCH, Measurement(ProbeStatus.TIMEOUT)
    )
    both = outcome_of(*ran_out(narrow).records, offloaded)
    assert as_searched(narrow, both).setting == wide.setting
    assert list(notes_on_untried(narrow, both))
    assert list(notes_on_untried(as_searched(narrow, both), both)) == []
