"""Times extrapolated from small traces, and steps without a predicted time: the optimizer runs on the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.documents.estimate import Estimate
from autotune.core.machine import Machine
from autotune.core.step_time import StepTime
from autotune.inspection.gpus import find_gpu
from autotune.planning.evaluator import Evaluator
from autotune.planning.extrapolation.forecast import mixed_times
from autotune.planning.single import PlanTracer, SizedPlan, TracedPlan
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.store import Traces
from autotune.probing.tracing import Untraceable
from autotune.trainers import find_trainer
from autotune.trainers.evaluation import whole_geometry
from autotune.units import GIB
from tests.planning.stand_in import AnalyticTracer
from tests.settings import GPU, TWO, WITH_DEEPSPEED, machine_with, problem, setting, workload

SENDING = 10.0


def overlapping(rows: int) -> StepTime:
    """Return the time of rows, each computed in 4 s, in parallel with one message of any number of rows."""
    computing = 4.0 * rows
    return StepTime(max(computing, SENDING), computing, 0.0, 0.0, 0.0, 0.0, communication_seconds=SENDING)


@pytest.mark.parametrize(("rows", "seconds"), [(1, 10.0), (2, 10.0), (4, 16.0), (8, 32.0)])
def test_what_waits_for_a_message_in_small_traces_computes_for_longer_in_large_ones(rows: int, seconds: float) -> None:
    # From 1 and 2 rows, both of which take as long as the message.
    terms = [(overlapping(1), 2.0 - rows), (overlapping(2), rows - 1.0)]
    assert mixed_times(terms) == overlapping(rows)
    assert mixed_times(terms).seconds == seconds


def test_copies_in_both_directions_take_their_sum_at_least() -> None:
    time = StepTime(3.0, 0.0, 0.0, 0.0, 6.0, 1.0)
    assert mixed_times([(time, 1.0)]).seconds == 6.0


def test_no_time_is_negative() -> None:
    assert mixed_times([(overlapping(1), -1.0)]) == StepTime(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def test_what_cannot_fit_has_the_rate_of_its_largest_micro_batches(tmp_path: Path) -> None:
    of = workload(lengths={100: 60, 400: 30, 1024: 10})
    here = problem(setting(machine=GPU, of=of), {"max_length": 1024})
    padded = here.baseline.but(per_device_train_batch_size=4, gradient_checkpointing="off", packing="none")

    def estimated(budget_bytes: int) -> Estimate:
        traces = Traces(AnalyticTracer(), Cache(tmp_path), "model", {})
        return Evaluator(here, find_gpu("H100-80GB"), budget_bytes, traces).run([padded])[0]

    lacking, fitting = estimated(1), estimated(80 * GIB)
    assert (lacking.tokens_per_second, fitting.scaled_tokens_per_second) == (None, None)
    geometry = whole_geometry(here.trainer, here.trainer.plan(padded, here.setting), here.setting.workload)
    share = sum(size.share * size.shape.tokens for size in geometry.sizes) / 1024
    # The formula of the stand-in: a part of the time does not depend on the tokens.
    seconds = share * (geometry.micro_batches * (0.001 + 1e-6 * 4 * 1024) + 0.001)
    assert lacking.scaled_tokens_per_second == pytest.approx(geometry.tokens_per_step / seconds, rel=0.01)
    assert fitting.tokens_per_second != pytest.approx(lacking.scaled_tokens_per_second, rel=0.01)


TWO_GPUS = machine_with(WITH_DEEPSPEED, processes=2)
ON_HOST = [("zero2", "optimizer"), ("zero3", "both"), ("fsdp2", "both")]
ON_DEVICE = [("ddp", "none"), ("zero2", "none"), ("zero3", "parameters"), ("fsdp2", "none")]


def told(machine: Machine, sharding: str, offload: str, folder: Path) -> list[bool]:
    """Return whether a plan has a predicted time in a search, without vLLM's, and in a single estimate."""
    fixed = {"max_length": "64", "packing": "none", "sharding": sharding, "offload": offload}
    here = problem(setting(machine=machine), fixed)
    gpu = find_gpu("H100-80GB") if machine is TWO_GPUS else None
    traces = Traces(AnalyticTracer(), Cache(folder), "model", {})
    evaluator = Evaluator(here, gpu, 80 * GIB, traces)
    candidate = here.baseline.but(sharding=sharding, offload=offload)
    (estimate,) = evaluator.run([candidate])
    traced = evaluator.traced_plan(candidate)
    plan = here.trainer.plan(candidate, here.setting)
    geometry = whole_geometry(find_trainer("sft"), plan, here.setting.workload)
    alone = PlanTracer(traces, here.setting, gpu).memory(SizedPlan(plan, geometry))
    assert estimate.memory is not None
    assert isinstance(traced, TracedPlan)
    assert (estimate.tokens_per_second is None) == (estimate.memory.step_seconds is None)
    return [memory.step_seconds is not None for memory in (estimate.memory, traced.memory, alone)]


@pytest.mark.parametrize(("sharding", "offload"), ON_HOST)
def test_no_time_is_told_where_the_optimizer_runs_on_the_host(sharding: str, offload: str, tmp_path: Path) -> None:
    assert told(TWO_GPUS, sharding, offload, tmp_path) == [False] * 3


@pytest.mark.parametrize(("sharding", "offload"), ON_DEVICE)
def test_weights_on_the_host_alone_leave_the_time_known(sharding: str, offload: str, tmp_path: Path) -> None:
    assert told(TWO_GPUS, sharding, offload, tmp_path) == [True] * 3


def test_the_time_of_several_ranks_is_that_of_the_largest_of_their_micro_batches(tmp_path: Path) -> None:
    here = problem(setting(of=workload(lengths={100: 9, 600: 1}), machine=TWO_GPUS), {"packing": "none"})
    plan = here.trainer.plan(here.baseline, here.setting)
    geometry = whole_geometry(find_trainer("sft"), plan, here.setting.workload)
    assert geometry.ranks == 2
    tracer = PlanTracer(Traces(AnalyticTracer(), Cache(tmp_path), "model", {}), here.setting, find_gpu("H100-80GB"))
    times = []
    for found in tracer.traced([SizedPlan(plan, replace(geometry, ranks=ranks)) for ranks in (1, 2)], timed=True):
        assert not isinstance(found, Untraceable)
        times.append(found.memory.step_seconds or 0.0)
    assert 0.0 < 1.05 * times[0] < times[1]


def test_on_a_cpu_the_optimizer_runs_where_it_is_traced(tmp_path: Path) -> None:
    assert told(TWO, "zero2", "optimizer", tmp_path) == [True] * 3
