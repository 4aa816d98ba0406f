"""Traces that are known are not run again, unless the allocator was not replayed as it is asked for now."""

from __future__ import annotations

from pathlib import Path

from autotune.core.plan import AllocatorUse, TrainingPlan
from autotune.core.protocol import TraceReply, TraceRequest
from autotune.core.workload import ModelSource
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.store import Traces
from tests.planning.stand_in import AnalyticTracer

GROWING, EMPTIED = AllocatorUse(expandable_segments=True), AllocatorUse(emptied=True)


def request(*allocators: AllocatorUse) -> TraceRequest:
    sizes = {"per_device_train_batch_size": 1, "packing": False, "optim": "sgd"}
    plan = TrainingPlan("sft", sizes, {})
    return TraceRequest(plan, ModelSource("model"), "cuda", ((64,),), layers=2, allocators=allocators)


def replays(directory: Path, tracer: AnalyticTracer, *allocators: AllocatorUse) -> list[AllocatorUse]:
    """Return what a run finds that asks for these uses of the allocator."""
    reply = Traces(tracer, Cache(directory), "model", {}).get([request(*allocators)])[0]
    assert isinstance(reply, TraceReply)
    return [found.allocator for found in reply.replays]


def test_a_trace_is_found_that_has_more_replays_than_are_asked_for(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    assert replays(tmp_path, tracer, GROWING) == [AllocatorUse(), GROWING]
    assert replays(tmp_path, tracer) == [AllocatorUse(), GROWING]
    assert len(tracer.requests) == 1


def test_a_trace_that_lacks_a_replay_is_run_again_with_those_that_it_has(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    replays(tmp_path, tracer, GROWING)
    assert set(replays(tmp_path, tracer, EMPTIED)) == {AllocatorUse(), EMPTIED, GROWING}
    replays(tmp_path, tracer, GROWING)
    assert len(tracer.requests) == 2


def test_requests_of_one_trace_are_run_once_for_all_their_replays(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    Traces(tracer, Cache(tmp_path), "model", {}).get([request(GROWING), request(EMPTIED)])
    assert [set(asked.replayed) for asked in tracer.requests] == [{AllocatorUse(), EMPTIED, GROWING}]
