"""Of a step whose optimizer runs on the host no time is told, neither in a search nor of a single plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.machine import Machine
from autotune.inspection.gpus import find_gpu
from autotune.planning.evaluator import Evaluator
from autotune.planning.single import PlanTracer, Sized
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.store import Traces
from autotune.space import Wishes
from autotune.trainers import find_trainer
from autotune.trainers.evaluation import whole_geometry
from autotune.units import GIB
from tests.planning.stand_in import AnalyticTracer
from tests.settings import GPU, TWO, problem, setting

TWO_GPUS = Machine(replace(GPU.hardware, processes=2), {**GPU.packages, "deepspeed": "0.19.8"})
ON_HOST = [("zero2", "optimizer"), ("zero3", "both"), ("fsdp2", "both")]
ON_DEVICE = [("ddp", "none"), ("zero2", "none"), ("zero3", "parameters"), ("fsdp2", "none")]


def told(machine: Machine, sharding: str, offload: str, folder: Path) -> list[bool]:
    """Return whether a time is told of a plan by a search, without what vLLM takes, and by itself."""
    wishes = Wishes({"max_length": "64", "packing": "none", "sharding": sharding, "offload": offload})
    here = problem(setting(machine=machine), wishes)
    gpu = find_gpu("H100-80GB") if machine is TWO_GPUS else None
    traces = Traces(AnalyticTracer(), Cache(folder), "model", {})
    evaluator = Evaluator(here, gpu, 80 * GIB, traces)
    candidate = here.baseline.but(sharding=sharding, offload=offload)
    (estimate,) = evaluator.run([candidate])
    traced = evaluator.traced_plan(candidate)
    plan = here.trainer.plan(candidate, here.setting)
    geometry = whole_geometry(find_trainer("sft"), plan, here.setting.workload)
    alone = PlanTracer(traces, here.setting, gpu).memory(Sized(plan, geometry))
    assert estimate.memory is not None
    assert traced is not None
    assert (estimate.tokens_per_second is None) == (estimate.memory.step_seconds is None)
    return [memory.step_seconds is not None for memory in (estimate.memory, traced.memory, alone)]


@pytest.mark.parametrize(("sharding", "offload"), ON_HOST)
def test_no_time_is_told_where_the_optimizer_runs_on_the_host(sharding: str, offload: str, tmp_path: Path) -> None:
    assert told(TWO_GPUS, sharding, offload, tmp_path) == [False] * 3


@pytest.mark.parametrize(("sharding", "offload"), ON_DEVICE)
def test_weights_on_the_host_alone_leave_the_time_known(sharding: str, offload: str, tmp_path: Path) -> None:
    assert told(TWO_GPUS, sharding, offload, tmp_path) == [True] * 3


def test_on_a_cpu_the_optimizer_runs_where_it_is_traced(tmp_path: Path) -> None:
    assert told(TWO, "zero2", "optimizer", tmp_path) == [True] * 3
