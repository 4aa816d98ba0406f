"""The distribution of traces among processes, and the results of the others if one fails."""

from __future__ import annotations

import errno
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.core.events import Event, Tracing, ignore
from autotune.core.files.scratch import scratch_folder
from autotune.core.jobs.exchange import write_reply, write_request
from autotune.core.jobs.protocol import LOG_FILE, Failure, Job
from autotune.core.jobs.traced import Peak, TraceReply, TraceRequest
from autotune.core.plan import TrainingPlan
from autotune.core.workload import ModelSource
from autotune.errors import AutotuneError, InputError, JobLostError, ProbeServerError
from autotune.probing import JobServer, trace
from autotune.probing.server import JobExit, Worker
from autotune.probing.tracing import ServerTracer, Untraceable
from autotune.step.child import execute
from autotune.step.job import JobContext, failure_of
from tests.probing.processes import running, wait_until
from tests.small import write_small_model

A_REPLY = TraceReply(Peak(1), Peak(0), 1, 64, 64.0)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_small_model(tmp_path / "model", weights=False))


def request(rows: int = 1, model: str = "model", **args: object) -> TraceRequest:
    plan = TrainingPlan("sft", {"per_device_train_batch_size": rows, "max_length": 64 * rows, **args}, {})
    return TraceRequest(plan, ModelSource(model), "cuda", ((64,),) * rows)


def test_a_trace_is_handed_over_before_the_next_one_has_ended(
    monkeypatch: pytest.MonkeyPatch, tracer: ServerTracer
) -> None:
    received, requests = threading.Event(), [request(), request(2)]

    def traced(_worker: object, asked: TraceRequest, *_: object) -> TraceReply:
        assert asked is requests[0] or received.wait(120)
        return A_REPLY

    monkeypatch.setattr("autotune.probing.tracing.trace", traced)
    found = iter(tracer(requests))
    assert next(found) is A_REPLY
    received.set()
    assert list(found) == [A_REPLY]


@pytest.mark.parametrize(
    ("other", "processes"), [({"optim": "adafactor"}, 1), ({"use_liger_kernel": True}, 2), ({"something_new": True}, 2)]
)
def test_only_those_for_which_libraries_are_the_same_are_traced_in_the_same_process(
    other: dict[str, Any], processes: int, monkeypatch: pytest.MonkeyPatch, tracer: ServerTracer
) -> None:
    used = set[int]()

    def traced(worker: Worker, *_: object) -> TraceReply:
        used.add(id(worker))
        return A_REPLY

    monkeypatch.setattr("autotune.probing.tracing.trace", traced)
    assert list(tracer([request(), request(**other), request(), request(**other)])) == [A_REPLY] * 4
    assert len(used) == processes


def children_of(server: JobServer) -> list[int]:
    server.wait()
    return [child.pid for child in psutil.Process(server.pid).children()]


def test_processes_stay_for_the_next_traces(tracer: ServerTracer, model: str) -> None:
    pids, others = [], children_of(tracer.server)
    for optim in ("adamw_torch", "adafactor", "lomo", "adamw_torch"):
        (traced,) = tracer([request(model=model, optim=optim)])
        assert isinstance(traced, TraceReply) == (optim != "lomo"), traced
        pids.append([pid for pid in children_of(tracer.server) if pid not in others])
    assert len(pids[0]) == 1
    assert pids[0] == pids[1]
    # One that failed is not used again.
    assert wait_until(lambda: not running(pids[0]))
    assert pids[3] != pids[0]


def test_one_that_cannot_be_traced_takes_none_with_it(tracer: ServerTracer, model: str) -> None:
    requests = [request(model=model), request(model=model, optim="lomo"), request(model=model, optim="adafactor")]
    first, failed, last = tracer(requests)

    assert isinstance(first, TraceReply)
    assert isinstance(last, TraceReply)
    assert isinstance(failed, Untraceable)
    assert failed.lasting
    assert "lomo" in failed.reason


def test_of_a_process_that_is_lost_each_way_to_train_is_tried_on_its_own(
    tracer: ServerTracer, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = list[Worker]()

    def killed_by_adafactor(
        worker: Worker, asked: TraceRequest, folder: Path, timeout_seconds: float | None = None
    ) -> TraceReply:
        if asked.plan.args.get("optim") == "adafactor":
            tried.append(worker)
            raise JobLostError("killed")
        return trace(worker, asked, folder, timeout_seconds)

    monkeypatch.setattr("autotune.probing.tracing.trace", killed_by_adafactor)
    kept, lost = tracer([request(model=model), request(model=model, optim="adafactor")])

    assert isinstance(kept, TraceReply)
    assert lost == Untraceable("killed", lasting=False)
    # Not in a new process alone, but first in the one that had traced the other.
    assert len(set(map(id, tried))) == 2


@pytest.mark.parametrize("error", [MemoryError("none left"), OSError(errno.EMFILE, "too many open files")])
def test_what_lacks_memory_or_files_may_be_tried_again(error: Exception, tmp_path: Path) -> None:
    write_reply(tmp_path, failure_of(error))
    with pytest.raises(JobLostError, match=type(error).__name__):
        trace(Ended(JobExit(1.0)), request(), tmp_path)


def test_a_trace_that_finds_a_full_disk_ends_all(tmp_path: Path) -> None:
    def trace_on_a_full_disk(request: TraceRequest, _: JobContext) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_request(tmp_path, Job.TRACE, request())
    execute(tmp_path, {Job.TRACE: trace_on_a_full_disk}, {})
    with pytest.raises(InputError, match="no space left on a disk"):
        trace(Ended(JobExit(1.0)), request(), tmp_path)


class Ended(JobServer):
    """A server whose jobs have ended already, in the folders that they are given."""

    def __init__(self, ending: JobExit) -> None:
        self.ending = ending

    def run(self, job: str, request: object, folder: Path, timeout_seconds: float | None = None) -> JobExit:
        return self.ending


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        (JobExit(1.0, server_died=True), "The job trace was lost: its process died."),
        (JobExit(1.0, server_died=True, oom_kills=1), "The job trace was killed by the kernel because memory ran out."),
        (JobExit(1.0, signal=9, oom_kills=1), "The job trace was killed by the kernel because memory ran out."),
        (JobExit(1.0, signal=9), "The job trace ended with signal 9, and its reply.json is absent."),
        (JobExit(120.0, timed_out=True), "The job trace exceeded its time limit and was killed after 2 min 00 s."),
    ],
)
def test_of_a_job_that_left_no_reply_its_end_is_reported(ending: JobExit, message: str, tmp_path: Path) -> None:
    with pytest.raises(JobLostError) as lost:
        trace(Ended(ending), request(), tmp_path)
    assert lost.value.message == message


def test_a_job_that_failed_has_its_traceback_for_debug_and_names_no_log_that_is_gone_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a probe that writes to its default directory, here.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder() as scratch:
        for folder, names_log in ((tmp_path / "autotune-model-data", True), (Path(scratch, "job-1"), False)):
            folder.mkdir(exist_ok=True)
            (folder / LOG_FILE).write_text("the last words")
            write_reply(folder, Failure("KeyError", "'layers'", "  File model.py, line 7"))
            with pytest.raises(AutotuneError, match="the last words") as failed:
                trace(Ended(JobExit(1.0)), request(), folder)
            assert "File model.py, line 7" in "".join(traceback.format_exception(failed.value))
            assert "model.py" not in str(failed.value)
            assert (str(folder) in str(failed.value)) is names_log


@pytest.mark.parametrize("error", [ProbeServerError("died twice"), InputError("no such model")])
def test_what_no_trace_can_do_without_ends_all(
    tracer: ServerTracer, monkeypatch: pytest.MonkeyPatch, error: AutotuneError
) -> None:
    def traced(*_: object) -> TraceReply:
        raise error

    monkeypatch.setattr("autotune.probing.tracing.trace", traced)
    with pytest.raises(type(error), match=error.message):
        list(tracer([request()]))


def test_one_that_takes_too_long_is_not_known_and_may_be_tried_again(
    tracer: ServerTracer, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.probing.tracing._TRACE_TIMEOUT_SECONDS", 0.0)
    (late,) = tracer([request(model=model)])

    assert isinstance(late, Untraceable)
    assert not late.lasting
    assert "exceeded its time limit" in late.reason


def test_traces_end_when_their_time_is_up(tracer: ServerTracer, model: str) -> None:
    with tracer.time_limit(60.0), tracer.time_limit(0.01):
        # The first one runs when its time is up.
        found = list(tracer([request(model=model)] * 2))
    (traced,) = tracer([request(model=model)])

    assert all(isinstance(each, Untraceable) and not each.lasting for each in found)
    assert found[1] == Untraceable("no time was left", lasting=False)
    assert isinstance(traced, TraceReply)


def test_how_many_have_been_run_is_told_up_to_the_last(job_server: JobServer, model: str) -> None:
    told = list[Event]()
    with ServerTracer(1, told.append, job_server) as tracer:
        assert len(list(tracer([request(model=model), request(model=model, optim="adafactor")]))) == 2
    assert all(isinstance(event, Tracing) and event.expected == 2 for event in told)
    done = [event.done for event in told if isinstance(event, Tracing)]
    assert done == sorted(set(done))
    assert (done[0], done[-1]) == (0, 2)


def test_an_interrupt_ends_the_traces_that_run_and_starts_no_more(
    job_server: JobServer, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[TraceRequest]()

    def without_end(
        worker: Worker, request: TraceRequest, folder: Path, timeout_seconds: float | None = None
    ) -> TraceReply:
        asked.append(request)
        while True:
            trace(worker, request, folder, timeout_seconds)

    def interrupt(event: Event) -> None:
        if isinstance(event, Tracing):
            assert wait_until(lambda: bool(asked))
            raise KeyboardInterrupt

    monkeypatch.setattr("autotune.probing.tracing.trace", without_end)
    requests = [request(model=model), request(model=model, something_new=True)]
    with ServerTracer(1, interrupt, job_server) as tracer:
        server = tracer.server
        with pytest.raises(KeyboardInterrupt):
            list(tracer(requests))
        assert asked == requests[:1]
        # The server is there for what comes next.
        monkeypatch.setattr("autotune.probing.tracing.trace", trace)
        monkeypatch.setattr(tracer, "_listener", ignore)
        (traced,) = tracer(requests[:1])
        assert isinstance(traced, TraceReply)
        assert tracer.server is server
