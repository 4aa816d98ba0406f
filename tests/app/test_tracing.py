"""How traces are given to processes, and what becomes of those beside one that fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from autotune.core.events import Event, StageStarted, Tracing, ignore
from autotune.core.plan import TrainingPlan
from autotune.core.traced import TraceReply, TraceRequest
from autotune.core.workload import ModelSource
from autotune.errors import AutotuneError, JobLostError
from autotune.probing import JobServer, trace_all
from autotune.probing.tracing import ServerTracer, Untraceable, groups
from autotune.probing.worker import Worker
from tests.probing.processes import running, wait_until
from tests.small import write_small_model


def request(rows: int = 1, model: str = "model", **args: object) -> TraceRequest:
    plan = TrainingPlan("sft", {"per_device_train_batch_size": rows, "max_length": 64 * rows, **args}, {})
    return TraceRequest(plan, ModelSource(model), "cuda", ((64,),) * rows)


def indices(requests: Sequence[TraceRequest], workers: int) -> list[tuple[int, ...]]:
    return [group.indices for group in groups(requests, workers)]


def test_plans_that_differ_in_sizes_alone_are_traced_one_after_another() -> None:
    requests = [request(1), request(1, use_liger_kernel=True), request(4), request(4, use_liger_kernel=True)]
    assert indices(requests, workers=1) == indices(requests, workers=2) == [(0, 2), (1, 3)]


def test_those_for_which_libraries_are_the_same_can_be_traced_in_the_same_process() -> None:
    requests = [request(), request(optim="adafactor"), request(bf16=True), request(use_liger_kernel=True)]
    first, second, third, liger = groups(requests, workers=1)
    assert first.libraries == second.libraries == third.libraries != liger.libraries


def test_what_is_not_known_to_leave_libraries_alone_has_a_process_of_its_own() -> None:
    requests = [request(), request(something_new=True), request(optim="adafactor", something_new=True)]
    plain, new, other = groups(requests, workers=1)
    assert plain.libraries != new.libraries == other.libraries


def test_a_trace_of_a_whole_model_starts_first() -> None:
    few = [replace(request(rows), layers=2) for rows in (1, 2, 3, 4)]
    whole = replace(request(gradient_checkpointing=False), layers=32)
    assert indices([*few, whole], workers=2) == [(4,), (0, 1, 2), (3,)]


def test_no_process_is_left_without_work_while_there_is_some() -> None:
    requests = [request(rows) for rows in (1, 2, 4)]
    assert indices(requests, workers=2) == [(0, 1), (2,)]
    assert indices(requests, workers=8) == [(0,), (1,), (2,)]


def children_of(server: JobServer) -> list[int]:
    server.wait()
    return [child.pid for child in psutil.Process(server.pid).children()]


def test_processes_stay_for_the_next_traces(job_server: JobServer, tmp_path: Path) -> None:
    model = str(write_small_model(tmp_path / "model", weights=False))
    with ServerTracer(1, ignore, job_server) as tracer:
        pids, others = [], children_of(tracer.server)
        for optim in ("adamw_torch", "adafactor", "lomo", "adamw_torch"):
            (traced,) = tracer([request(model=model, optim=optim)])
            assert isinstance(traced, TraceReply) == (optim != "lomo"), traced
            pids.append([pid for pid in children_of(tracer.server) if pid not in others])
        assert len(pids[0]) == 1
        assert pids[0] == pids[1]
        # One that failed is not used again.
        assert wait_until(lambda: not running(pids[0]), seconds=5)
        assert pids[3] != pids[0]


def test_one_that_cannot_be_traced_takes_none_with_it(job_server: JobServer, tmp_path: Path) -> None:
    model = str(write_small_model(tmp_path / "model", weights=False))
    requests = [request(model=model), request(model=model, optim="lomo"), request(model=model, optim="adafactor")]
    with ServerTracer(1, ignore, job_server) as tracer:
        first, failed, last = tracer(requests)

    assert isinstance(first, TraceReply)
    assert isinstance(last, TraceReply)
    assert isinstance(failed, Untraceable)
    assert failed.lasting
    assert "lomo" in failed.reason


def test_of_a_process_that_is_lost_each_way_to_train_is_tried_on_its_own(
    job_server: JobServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed_by_adafactor(
        server: JobServer | Worker, requests: Sequence[TraceRequest], folder: Path, timeout_seconds: float | None = None
    ) -> tuple[tuple[TraceReply, ...], AutotuneError | None]:
        if any(one.plan.args.get("optim") == "adafactor" for one in requests):
            raise JobLostError("killed")
        return trace_all(server, requests, folder, timeout_seconds)

    monkeypatch.setattr("autotune.probing.tracing.trace_all", killed_by_adafactor)
    model = str(write_small_model(tmp_path / "model", weights=False))
    with ServerTracer(1, ignore, job_server) as tracer:
        kept, lost = tracer([request(model=model), request(model=model, optim="adafactor")])

    assert isinstance(kept, TraceReply)
    assert lost == Untraceable("killed", lasting=False)


def test_one_that_takes_too_long_is_not_known_and_may_be_tried_again(
    job_server: JobServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.probing.tracing._LONGEST_SECONDS", 0.0)
    model = str(write_small_model(tmp_path / "model", weights=False))
    with ServerTracer(1, ignore, job_server) as tracer:
        (late,) = tracer([request(model=model)])

    assert isinstance(late, Untraceable)
    assert not late.lasting
    assert "longer than it may take" in late.reason


def test_how_many_have_been_run_is_told_up_to_the_last(job_server: JobServer, tmp_path: Path) -> None:
    model, told = str(write_small_model(tmp_path / "model", weights=False)), list[Event]()
    with ServerTracer(1, told.append, job_server) as tracer:
        tracer([request(model=model), request(model=model, optim="adafactor")])
    stage, *counts = told
    assert stage == StageStarted("Tracing 2 training steps with no GPU")
    assert all(isinstance(event, Tracing) and event.expected == 2 for event in counts)
    done = [event.done for event in counts if isinstance(event, Tracing)]
    assert done == sorted(set(done))
    assert (done[0], done[-1]) == (0, 2)


def test_an_interrupt_ends_the_traces_that_run_and_starts_no_more(
    job_server: JobServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = str(write_small_model(tmp_path / "model", weights=False)), list[int]()

    def without_end(
        server: JobServer | Worker, requests: Sequence[TraceRequest], folder: Path, timeout_seconds: float | None = None
    ) -> tuple[tuple[TraceReply, ...], AutotuneError | None]:
        asked.append(len(requests))
        return trace_all(server, [*requests] * 10_000, folder, timeout_seconds)

    def interrupt(event: Event) -> None:
        if isinstance(event, Tracing) and event.done:
            raise KeyboardInterrupt

    monkeypatch.setattr("autotune.probing.tracing.trace_all", without_end)
    requests = [request(model=model), request(model=model, something_new=True)]
    with ServerTracer(1, interrupt, job_server) as tracer:
        server = tracer.server
        with pytest.raises(KeyboardInterrupt):
            tracer(requests)
        assert asked == [1]
        # The server is there for what comes next.
        monkeypatch.setattr("autotune.probing.tracing.trace_all", trace_all)
        monkeypatch.setattr(tracer, "_listener", ignore)
        (traced,) = tracer(requests[:1])
        assert isinstance(traced, TraceReply)
        assert tracer.server is server
