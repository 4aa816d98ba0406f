"""Known traces are not run again, unless they lack the figures for a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.jobs.traced import TraceReply, TraceRequest
from autotune.core.plan import TrainingPlan
from autotune.core.workload import ModelSource
from autotune.inspection.gpus import find_gpu
from autotune.planning.tracing.cache import Cache, digest_of
from autotune.planning.tracing.store import Traces
from autotune.probing.tracing import Traced, Untraceable
from tests.planning.stand_in import AnalyticTracer


def request() -> TraceRequest:
    sizes = {"per_device_train_batch_size": 1, "packing": False, "optim": "sgd"}
    return TraceRequest(TrainingPlan("sft", sizes, {}), ModelSource("model"), "cuda", ((64,),), layers=2)


def test_a_trace_in_which_the_cache_is_emptied_is_another_one(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    for emptied in (False, True, False):
        Traces(tracer, Cache(tmp_path), "model", {}).get([replace(request(), emptied=emptied)])
    assert [asked.emptied for asked in tracer.requests] == [False, True]


@pytest.mark.parametrize(
    "broken",
    [
        "[" * 10_000, "{}", "[{}]", '[{"peaks": {"a": 1e999}}]', '[["9", {"reason": "why"}]]',
    ],
    ids=["deep", "no list", "empty", "shape", "failure"],
)  # fmt: skip
def test_a_broken_document_of_the_cache_is_written_anew(tmp_path: Path, broken: str) -> None:
    tracer = AnalyticTracer()
    Traces(tracer, Cache(tmp_path), "model", {}).get([request()])
    (file,) = tmp_path.glob("*.json")
    before = file.read_text(encoding="utf-8")
    file.write_text(broken, encoding="utf-8")
    Traces(tracer, Cache(tmp_path), "model", {}).get([request()])
    assert (len(tracer.requests), file.read_text(encoding="utf-8")) == (2, before)


A100, H100, H200 = map(find_gpu, ("A100-80GB", "H100-SXM", "H200"))


def test_a_trace_for_one_gpu_is_that_of_others_with_the_same_kernels(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    asked = [replace(request(), gpu=gpu) for gpu in (A100, H100, H200)]
    traces = Traces(tracer, Cache(tmp_path), "model", {}, (A100, H100, H200))
    for each in asked:
        traces.get([each])
    assert (len(tracer.requests), traces.count, traces.new_count) == (1, 1, 1)
    again = Traces(tracer, Cache(tmp_path), "model", {})
    for each in asked:
        again.get([each])
    assert (len(tracer.requests), again.count, again.new_count) == (1, 1, 0)


def test_a_trace_that_does_not_stand_for_a_gpu_is_run_for_it(tmp_path: Path) -> None:
    class Unlike(AnalyticTracer):
        """Reports that only the requested GPU uses the same kernels."""

        def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
            """Answer requests."""
            return super().__call__([replace(each, others=()) for each in requests])

    tracer = Unlike()
    traces = Traces(tracer, Cache(tmp_path), "model", {}, (A100, H100))
    traces.get([replace(request(), gpu=A100)])
    traces.get([replace(request(), gpu=H100)])
    assert [asked.gpu for asked in tracer.requests] == [A100, H100]
    again = Traces(tracer, Cache(tmp_path), "model", {})
    again.get([replace(request(), gpu=gpu) for gpu in (A100, H100)])
    assert (len(tracer.requests), again.count, again.new_count) == (2, 2, 0)


def test_a_failure_on_one_gpu_is_kept_beside_the_trace_for_another(tmp_path: Path) -> None:
    class Failing(AnalyticTracer):
        """Traces for an A100 alone."""

        def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
            """Answer requests."""
            for asked, reply in zip(requests, super().__call__(requests), strict=True):
                yield reply if asked.gpu == A100 else Untraceable("there is no such kernel")

    tracer = Failing()
    asked = [replace(request(), gpu=gpu) for gpu in (A100, H100)]
    first = Traces(tracer, Cache(tmp_path), "model", {}).get(asked)
    assert Traces(tracer, Cache(tmp_path), "model", {}).get(asked) == first
    assert first[1] == Untraceable("there is no such kernel")
    assert len(tracer.requests) == 2


def test_a_trace_without_the_speeds_of_a_gpu_is_run_again_with_those_that_it_has(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    Traces(tracer, Cache(tmp_path), "model", {}).get([replace(request(), gpu=H100)])
    Traces(tracer, Cache(tmp_path), "model", {}).get([replace(request(), gpu=H200)])
    assert [gpu.speeds for gpu in tracer.requests[1].others] == [H100.speeds]
    Traces(tracer, Cache(tmp_path), "model", {}).get([replace(request(), gpu=H100)])
    assert len(tracer.requests) == 2


def test_a_shared_trace_that_was_removed_from_the_cache_is_run_again(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    Traces(tracer, Cache(tmp_path), "model", {}, (A100, H100)).get([replace(request(), gpu=A100)])
    largest = max(tmp_path.glob("*.json"), key=lambda file: file.stat().st_size)
    largest.unlink()
    Traces(tracer, Cache(tmp_path), "model", {}).get([replace(request(), gpu=H100)])
    assert len(tracer.requests) == 2


def test_another_network_is_timed_for_itself_and_the_times_of_both_are_kept(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    slow, fast = (replace(request(), gpu=H100.networked(network)) for network in (5e10, 4e11))
    for asked in (slow, fast, slow, fast):
        reply = Traces(tracer, Cache(tmp_path), "model", {}).get([asked])[0]
        assert isinstance(reply, TraceReply)
        assert any(figures.are_of(asked.gpu) for figures in reply.gpus)
    assert [asked.gpu for asked in tracer.requests] == [slow.gpu, fast.gpu]
    assert [gpu.speeds for gpu in tracer.requests[1].others] == [slow.gpu and slow.gpu.speeds]


def test_gpus_that_share_a_trace_are_in_machines_with_the_same_network(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    traces = Traces(tracer, Cache(tmp_path), "model", {}, (A100, H100))
    traces.get([replace(request(), gpu=A100.networked(5e10))])
    assert tracer.requests[0].others == (H100.networked(5e10),)
    traces.get([replace(request(), gpu=H100.networked(5e10))])
    assert len(tracer.requests) == 1


@pytest.mark.parametrize(
    "file",
    [
        "virtual/engine/device.py",
        "virtual/cuda_kernels.yaml",
        "virtual/kernels/flash.py",
        "step/jobs/trace.py",
        "core/plan.py",
    ],
)
def test_a_change_anywhere_below_the_package_counts(tmp_path: Path, file: str) -> None:
    target = tmp_path / file
    target.parent.mkdir(parents=True)
    target.write_text("a = 1", encoding="utf-8")
    before = digest_of(tmp_path)
    target.write_text("a = 2", encoding="utf-8")
    assert digest_of(tmp_path) != before
    target.rename(target.with_name(f"other{target.suffix}"))
    assert digest_of(tmp_path) != before


def test_the_deepest_traces_are_run_first(tmp_path: Path) -> None:
    tracer = AnalyticTracer()
    asked = [replace(request(), layers=layers) for layers in (2, 32, 1)]
    found = Traces(tracer, Cache(tmp_path), "model", {}).get(asked)
    assert [each.layers for each in tracer.requests] == [32, 2, 1]
    peaks = [reply.device.bytes for reply in found if isinstance(reply, TraceReply)]
    assert peaks[2] < peaks[0] < peaks[1]


def test_traces_that_run_end_with_an_error_of_what_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = list[int]()

    class Running(AnalyticTracer):
        """Hands over one trace after another."""

        def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
            """Answer requests."""
            try:
                yield from super().__call__(requests)
            finally:
                ended.append(len(requests))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Cache, "put", interrupted)
    with pytest.raises(KeyboardInterrupt) as interruption:
        Traces(Running(), Cache(tmp_path), "model", {}).get([request()])
    # The frames that the error has passed through are still there.
    assert interruption.traceback
    assert ended == [1]


def test_what_was_traced_before_an_interruption_is_not_traced_again(tmp_path: Path) -> None:
    class Interrupted(AnalyticTracer):
        """Traces one step, and is interrupted."""

        def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
            """Answer the first request."""
            yield from super().__call__(requests[:1])
            raise KeyboardInterrupt

    asked = [replace(request(), layers=layers) for layers in (3, 2)]
    with pytest.raises(KeyboardInterrupt):
        Traces(Interrupted(), Cache(tmp_path), "model", {}).get(asked)
    tracer = AnalyticTracer()
    Traces(tracer, Cache(tmp_path), "model", {}).get(asked)
    assert [each.layers for each in tracer.requests] == [2]
