"""How traces are shared out among processes, and what becomes of those beside one that fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.events import Event, StageStarted, Tracing, ignore
from autotune.core.plan import TrainingPlan
from autotune.core.protocol import TraceReply, TraceRequest
from autotune.core.workload import ModelSource
from autotune.errors import AutotuneError, JobLostError
from autotune.probing import JobServer, trace_all
from autotune.probing.tracing import ServerTracer, Untraceable, shared_out
from tests.small import write_small_model


def request(rows: int = 1, model: str = "model", **args: object) -> TraceRequest:
    plan = TrainingPlan("sft", {"per_device_train_batch_size": rows, "max_length": 64 * rows, **args}, {})
    return TraceRequest(plan, ModelSource(model), "cuda", ((64,),) * rows)


def test_plans_that_differ_in_sizes_alone_share_a_process() -> None:
    requests = [request(1), request(1, use_liger_kernel=True), request(4), request(4, use_liger_kernel=True)]
    assert shared_out(requests, servers=2) == [[[0, 2]], [[1, 3]]]


def test_so_do_those_for_which_libraries_are_the_same() -> None:
    requests = [request(), request(optim="adafactor"), request(bf16=True), request(use_liger_kernel=True)]
    assert shared_out(requests, servers=1) == [[[0], [1], [2]], [[3]]]


def test_a_trace_of_a_whole_model_has_a_job_of_its_own_which_starts_first() -> None:
    few = [replace(request(rows), layers=2) for rows in (1, 2, 3, 4)]
    whole = replace(request(gradient_checkpointing=False), layers=32)
    assert shared_out([*few, whole], servers=2) == [[[4]], [[0, 1, 2, 3]]]


def test_what_is_not_known_to_leave_libraries_alone_has_a_process_of_its_own() -> None:
    requests = [request(), request(something_new=True), request(optim="adafactor", something_new=True)]
    assert shared_out(requests, servers=1) == [[[1], [2]], [[0]]]


def test_no_process_is_left_without_work_while_there_is_some() -> None:
    requests = [request(rows) for rows in (1, 2, 4)]
    assert sorted(shared_out(requests, servers=2)) == [[[0, 1]], [[2]]]
    assert sorted(shared_out(requests, servers=8)) == [[[0]], [[1]], [[2]]]


def test_jobs_end_at_about_the_same_time() -> None:
    plain = [request(rows, optim=optim) for optim in "abcdefgh" for rows in (1, 2, 4, 8, 16)]
    liger = [request(rows, optim=optim, use_liger_kernel=True) for optim in "abcd" for rows in (1, 2, 4, 8, 16)]
    jobs = [sum(map(len, job)) for job in shared_out([*plain, *liger], servers=2)]
    assert jobs == sorted(jobs, reverse=True)
    ends = [0, 0]
    for size in jobs:
        ends[ends.index(min(ends))] += size
    assert max(ends) <= 35


def test_one_that_cannot_be_traced_takes_none_with_it(tmp_path: Path) -> None:
    model = str(write_small_model(tmp_path / "model", weights=False))
    requests = [request(model=model), request(model=model, optim="lomo"), request(model=model, optim="adafactor")]
    with ServerTracer(1, ignore) as tracer:
        first, failed, last = tracer(requests)

    assert isinstance(first, TraceReply)
    assert isinstance(last, TraceReply)
    assert isinstance(failed, Untraceable)
    assert failed.lasting
    assert "lomo" in failed.reason


def test_of_a_process_that_is_lost_each_way_to_train_is_tried_on_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed_by_adafactor(
        server: JobServer, requests: Sequence[TraceRequest], folder: Path, timeout_seconds: float | None = None
    ) -> tuple[tuple[TraceReply, ...], AutotuneError | None]:
        if any(one.plan.args.get("optim") == "adafactor" for one in requests):
            raise JobLostError("killed")
        return trace_all(server, requests, folder, timeout_seconds)

    monkeypatch.setattr("autotune.probing.tracing.trace_all", killed_by_adafactor)
    model = str(write_small_model(tmp_path / "model", weights=False))
    with ServerTracer(1, ignore) as tracer:
        kept, lost = tracer([request(model=model), request(model=model, optim="adafactor")])

    assert isinstance(kept, TraceReply)
    assert lost == Untraceable("killed", lasting=False)


def test_how_many_have_been_run_is_told_up_to_the_last(tmp_path: Path) -> None:
    model, told = str(write_small_model(tmp_path / "model", weights=False)), list[Event]()
    with ServerTracer(1, told.append) as tracer:
        tracer([request(model=model), request(model=model, optim="adafactor")])
    stage, *counts = told
    assert stage == StageStarted("Tracing 2 training steps with no GPU")
    assert all(isinstance(event, Tracing) and event.expected == 2 for event in counts)
    done = [event.done for event in counts if isinstance(event, Tracing)]
    assert done == sorted(set(done))
    assert (done[0], done[-1]) == (0, 2)


def test_an_interrupt_ends_the_traces_that_run_and_starts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = str(write_small_model(tmp_path / "model", weights=False)), list[int]()

    def without_end(
        server: JobServer, requests: Sequence[TraceRequest], folder: Path, timeout_seconds: float | None = None
    ) -> tuple[tuple[TraceReply, ...], AutotuneError | None]:
        asked.append(len(requests))
        return trace_all(server, [*requests] * 10_000, folder, timeout_seconds)

    def interrupt(event: Event) -> None:
        if isinstance(event, Tracing) and event.done:
            raise KeyboardInterrupt

    monkeypatch.setattr("autotune.probing.tracing.trace_all", without_end)
    requests = [request(model=model), request(model=model, something_new=True)]
    with ServerTracer(1, interrupt) as tracer:
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
