"""Measured speeds of a device, and measured times of single operators."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.jobs.protocol import OperatorsRequest, SpeedsRequest
from autotune.probing import JobServer, measure_operators, measure_speeds
from autotune.step.job import JobContext
from autotune.step.jobs.measure_operators import measure_operators as measure_operators_here
from autotune.step.run.meters import METERS, CpuMeter, Mark


def product(side: int) -> str:
    """Return a product of two square matrices as a call."""
    tensor = f'{{"tensor": [[{side}, {side}], [{side}, 1], "float32", true]}}'
    return f'["aten.mm.default", [{tensor}, {tensor}], {{}}]'


SMALL, LARGE = product(8), product(512)
DIFFERENT = SMALL.replace("[8, 8]", "[8, 7]", 1)
"""A product whose inner dimensions differ."""


def measured(server: JobServer, folder: Path, *calls: str, seconds: float = 60.0) -> dict[str, float | None]:
    return measure_operators(server, OperatorsRequest(calls, "cpu", seconds), folder)


def test_a_job_times_operators_and_reports_those_that_cannot_run(job_server: JobServer, tmp_path: Path) -> None:
    found = measured(job_server, tmp_path, SMALL, DIFFERENT, '["aten.none_such.default", [], {}]', LARGE)
    assert found[DIFFERENT] is None
    assert found['["aten.none_such.default", [], {}]'] is None
    # 262,144 times the work: no load of the machine hides that.
    assert 0 < (found[SMALL] or 0) < (found[LARGE] or 0)


def test_operators_are_left_out_once_the_time_is_over(job_server: JobServer, tmp_path: Path) -> None:
    assert measured(job_server, tmp_path, SMALL, LARGE, seconds=0.0) == {}


def test_an_operator_that_needs_more_memory_than_is_allowed_has_no_time(job_server: JobServer, tmp_path: Path) -> None:
    request = OperatorsRequest((product(1 << 15), SMALL), "cpu", 60.0, limit_bytes=1 << 30)
    found = measure_operators(job_server, request, tmp_path)
    assert found[product(1 << 15)] is None
    assert found[SMALL] is not None


class Broken(CpuMeter):
    """Stands in for a GPU on which a kernel has failed: everything fails from then on."""

    def synchronize(self) -> None:
        """Fail as CUDA does."""
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_operators_after_a_kernel_that_failed_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(METERS, "cpu", Broken)
    request = OperatorsRequest((DIFFERENT, SMALL), "cpu", 60.0)
    assert measure_operators_here(request, JobContext(tmp_path, 0.0)) == {DIFFERENT: None}


class Scripted(CpuMeter):
    """Stands in for a CPU on which the runs of an operator take the given seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds = [7.2e-3, 6.7e-3, 2.5e-3, 6.7e-3, 2.4e-3, *[2.2e-3] * 100]
        self._at, self._begins = 0.0, True

    def mark(self) -> Mark:
        """Return a mark at the beginning of a run, or after its seconds."""
        self._begins = not self._begins
        self._at += self._seconds.pop(0) if self._begins else 0.0
        return Mark(self._at)


def test_first_runs_that_wait_for_new_memory_do_not_make_the_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A softmax of 11 MiB took 7 ms in its first runs and 2 ms in all later ones."""
    monkeypatch.setitem(METERS, "cpu", Scripted)
    found = measure_operators_here(OperatorsRequest((SMALL,), "cpu", 60.0), JobContext(tmp_path, 0.0))
    assert (found[SMALL] or 0) < 3e-3


def test_a_job_measures_products_and_copies(job_server: JobServer, tmp_path: Path) -> None:
    speeds = measure_speeds(job_server, SpeedsRequest(seconds=0.02), tmp_path)
    # No CPU that runs this does less than 0.1 or more than 100,000 billion operations in a second.
    assert all(1e8 < speed < 1e14 for speed in (speeds.fp32, speeds.fp16, speeds.bf16 or 0, speeds.bandwidth))
    assert speeds.source == "measured"
    # An operator of PyTorch in eager mode takes some microseconds.
    assert 5e-7 < (speeds.launch_seconds or 0) < 1e-3
