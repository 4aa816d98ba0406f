"""The rank of ZeRO-2 that a trace simulates."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from autotune.core.jobs.traced import TraceRequest
from autotune.core.plan import Launch, TrainingPlan
from autotune.core.workload import ModelSource
from autotune.step.run.traced_training import TraceFacts
from tests.step.plans import zero


@pytest.mark.parametrize("reserved", [(580, 496), (496, 580)])
def test_of_the_ranks_of_zero_2_the_one_that_reserves_the_most_is_traced(
    reserved: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = importlib.import_module("autotune.step.jobs.trace")
    peaks = [SimpleNamespace(peak_reserved_bytes=size, peak_allocated_bytes=0) for size in reserved]
    monkeypatch.setattr(job, "run_virtually", lambda *_, world, **__: world.rank)
    monkeypatch.setattr(job, "replay", lambda rank, **_: peaks[rank])
    plan = TrainingPlan("sft", zero(2), launch=Launch(2))
    request = TraceRequest(plan=plan, model=ModelSource("model"), target="cuda", worst=((8,),))

    traced = job._trace_worst(lambda _: None, request, TraceFacts(gradients=(1, 2)), is_whole=True)

    assert reserved[traced] == max(reserved)
