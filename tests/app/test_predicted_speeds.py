"""Predictions use speeds measured on a CPU, or the catalogue's for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.app.predictions import device_of, speeds_of, times_of
from autotune.core.gpu import GpuSpeeds
from autotune.errors import AutotuneError
from autotune.planning.extrapolation.forecast import PROCESS_BYTES
from autotune.planning.tracing.cache import Cache
from autotune.probing import JobServer
from autotune.probing.tracing import ServerTracer
from autotune.units import GIB
from tests.app.replaying import no_server
from tests.app.test_predicted import problem_of, traced
from tests.planning.stand_in import AnalyticTracer
from tests.settings import CPU, GPU, machine_with, setting

MEASURED = GpuSpeeds(1e10, 1e11, 1e9, 2e11, None, 1e10, None, "measured")


@pytest.fixture
def launch_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], float | None]:
    """Return the time of a launch that is measured as 10 microseconds first, and then as 20."""
    speeds = iter(replace(MEASURED, launch_seconds=seconds) for seconds in (1e-5, 2e-5))
    monkeypatch.setattr("autotune.app.predictions.measure_speeds", lambda *_: next(speeds))
    return lambda: speeds_of(GPU, no_server(), tmp_path, Cache(tmp_path / "cache")).launch_seconds


def test_a_cpu_is_measured_once(job_server: JobServer, tmp_path: Path) -> None:
    machine, cache = setting().machine, Cache(tmp_path)
    first = speeds_of(machine, job_server, tmp_path / "a", cache)
    assert speeds_of(machine, job_server, tmp_path / "b", cache) == first
    assert not (tmp_path / "b").exists()
    assert device_of(machine.hardware, lambda _: MEASURED).speeds == MEASURED


def test_the_host_of_a_gpu_is_measured_on_each_host(
    launch_seconds: Callable[[], float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for host in ("one", "another", "one"):
        monkeypatch.setattr("autotune.app.predictions.machine_id", lambda host=host: host)
        found.append(launch_seconds())
    assert found == [1e-5, 2e-5, 1e-5]


@pytest.mark.parametrize(("days", "measured"), [(29, [1e-5, 1e-5]), (31, [1e-5, 2e-5]), (-1, [1e-5, 2e-5])])
def test_speeds_are_measured_again_after_a_month_or_when_the_clock_went_back(
    launch_seconds: Callable[[], float | None], monkeypatch: pytest.MonkeyPatch, days: int, measured: list[float]
) -> None:
    found = []
    for now in (1e9, 1e9 + 86400 * days):
        monkeypatch.setattr("time.time", lambda now=now: now)
        found.append(launch_seconds())
    assert found == measured


def test_traces_for_a_gpu_have_the_time_of_its_own_host_where_it_can_be_measured() -> None:
    def on_this_host(gpu: GpuSpeeds | None) -> GpuSpeeds:
        assert gpu is not None
        return replace(gpu, launch_seconds=1e-4)

    def not_measured(_: GpuSpeeds | None) -> GpuSpeeds:
        raise AutotuneError("The job failed.")

    hardware = replace(GPU.hardware, name="NVIDIA H100 80GB HBM3")
    found, unknown = (device_of(hardware, each).speeds for each in (on_this_host, not_measured))
    assert found is not None
    assert unknown is not None
    assert found.launch_seconds == 1e-4
    assert unknown == replace(found, launch_seconds=None)


def test_operators_are_measured_on_a_cpu_and_on_a_gpu_their_times_follow_from_the_catalogue(
    tracer: ServerTracer, tmp_path: Path
) -> None:
    on_cpu, on_gpu = (times_of(machine, None, GIB, no_server(), tracer, Cache(tmp_path)) for machine in (CPU, GPU))
    assert on_cpu is not None
    assert on_gpu is None


def test_times_of_operators_are_kept_for_the_speeds_by_which_they_were_predicted(
    tracer: ServerTracer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.app.predictions.OperatorTimes", lambda *arguments: arguments[-1])
    fast = replace(MEASURED, bandwidth=5e10)
    one, same, other = (
        times_of(CPU, speeds, GIB, no_server(), tracer, Cache(tmp_path)) for speeds in (MEASURED, MEASURED, fast)
    )
    assert one == same != other


def test_a_gpu_of_unknown_speed_is_noted(tmp_path: Path) -> None:
    strange = machine_with(GPU, name="NVIDIA Strange 9000")
    predictions = traced(tmp_path, AnalyticTracer(), problem_of(machine=strange), seconds=0.0)
    assert predictions.notes() == ("The speed of NVIDIA Strange 9000 is not known, so no speed is predicted.",)


def test_traces_for_a_cpu_are_timed_by_its_measured_speeds(tmp_path: Path) -> None:
    problem, tracer = problem_of(machine=CPU), AnalyticTracer()
    predictions = traced(tmp_path, tracer, problem, speeds=lambda _: MEASURED)
    assert {request.target for request in tracer.requests} == {"cpu"}
    assert {request.gpu.speeds if request.gpu else None for request in tracer.requests} == {MEASURED}
    assert predictions.predictor is not None
    baseline = predictions.predictor.predict(problem.baseline)
    assert baseline is not None
    assert predictions.evaluator is not None
    memory = predictions.evaluator.estimate(problem.baseline).memory
    assert memory is not None
    # A small model holds a share of its tensors, a large one a fixed amount.
    assert memory.breakdown["process"] == min(PROCESS_BYTES, round(memory.peak_bytes / 4))
    assert baseline.need_bytes == memory.device_bytes == memory.peak_bytes + memory.breakdown["process"]
    assert baseline.tokens_per_second is not None


def test_a_cpu_that_cannot_be_measured_is_told_and_ends_nothing(tmp_path: Path) -> None:
    predictions = traced(tmp_path, AnalyticTracer(), problem_of(machine=CPU))
    assert predictions.predictor is None
    assert "no process can be started" in predictions.notes()[0]
