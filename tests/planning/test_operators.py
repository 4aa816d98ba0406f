"""Traces with operator times that were measured on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.jobs.traced import Peak, TracedOperator, TraceReply
from autotune.core.machine import DeviceKind
from autotune.core.step_time import StepTime
from autotune.core.timeline import Occurrence, Part, Section
from autotune.errors import AutotuneError
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.operators import OperatorTimes, form_of
from autotune.probing.tracing import Traced, Untraceable


def mul(rows: int, stride: int = 64) -> str:
    """Return an elementwise product of matrices with this number of rows, as a call."""
    tensor = f'{{"tensor": [[{rows}, 64], [{stride}, 1], "float32", true]}}'
    return f'["aten.mul.Tensor", [{tensor}, {tensor}], {{}}]'


def reply(*operators: tuple[str, float, int], launch_seconds: float = 0.5) -> TraceReply:
    """Return a trace of one section, given the call of each operator, its predicted seconds and how often it ran."""
    device_seconds = sum(seconds * count for _, seconds, count in operators)
    time = StepTime(max(device_seconds, launch_seconds), 0.0, 0.0, device_seconds, 0.0, launch_seconds)
    counts = {number: count for number, (_, _, count) in enumerate(operators)}
    section = Section(Part("micro-batch", Occurrence.FIRST), (), {}, time=time, operators=counts)
    found = tuple(TracedOperator(call, seconds, "elementwise_seconds") for call, seconds, _ in operators)
    return TraceReply(Peak(0), Peak(0), 1, 1, 1.0, sections=(section,), operators=found)


class Device:
    """Stands in for a device on which every operator takes a certain time."""

    def __init__(self, seconds: Mapping[str, float | None]) -> None:
        self.seconds = seconds
        self.asked: list[list[str]] = []

    def __call__(self, calls: Sequence[str]) -> Mapping[str, float | None]:
        self.asked.append([*calls])
        return {call: self.seconds[call] for call in calls if call in self.seconds}


def seconds_of(times: OperatorTimes, traced: TraceReply) -> float:
    (found,) = times.with_measured_times([traced])
    assert isinstance(found, TraceReply)
    assert found.sections[0].time is not None
    return found.sections[0].time.seconds


def times_on(device: Device, folder: Path, kind: DeviceKind = "cpu") -> OperatorTimes:
    return OperatorTimes(kind, device, Cache(folder), "0" * 32)


@pytest.mark.parametrize(("kind", "seconds"), [("cpu", 2 * 3.0 + 5.0 + 0.5), ("cuda", 2 * 3.0 + 5.0)])
def test_a_section_takes_what_its_operators_take_and_on_a_cpu_what_prepares_them_too(
    kind: DeviceKind, seconds: float, tmp_path: Path
) -> None:
    device = Device({mul(8): 3.0, mul(64): 5.0})
    assert seconds_of(times_on(device, tmp_path, kind), reply((mul(8), 1.0, 2), (mul(64), 8.0, 1))) == seconds


def test_a_gpu_is_not_faster_than_the_host_that_prepares_its_operators(tmp_path: Path) -> None:
    assert seconds_of(times_on(Device({mul(8): 0.1}), tmp_path, "cuda"), reply((mul(8), 1.0, 2))) == 0.5


def test_an_operator_is_measured_once_and_stands_for_its_like_of_nearly_the_same_size(tmp_path: Path) -> None:
    device = Device({mul(110): 2.2, mul(400): 4.0})
    times = times_on(device, tmp_path)
    assert seconds_of(times, reply((mul(100), 1.0, 1), (mul(110), 1.1, 1), launch_seconds=0.0)) == pytest.approx(4.2)
    assert seconds_of(times, reply((mul(90), 0.9, 1), (mul(400), 4.0, 1), launch_seconds=0.0)) == pytest.approx(5.8)
    assert device.asked == [[mul(110)], [mul(400)]]


def test_operators_on_other_layouts_are_measured_by_themselves() -> None:
    assert form_of(mul(8)) == form_of(mul(16))
    assert form_of(mul(8)) != form_of(mul(8, stride=0))


@pytest.mark.parametrize("seconds", [{mul(8): None}, {}], ids=["cannot be run", "no time was left"])
def test_what_was_not_measured_keeps_its_predicted_time(seconds: Mapping[str, float | None], tmp_path: Path) -> None:
    assert seconds_of(times_on(Device(seconds), tmp_path), reply((mul(8), 1.0, 1))) == 1.5


def test_measured_times_are_kept_for_later_runs(tmp_path: Path) -> None:
    seconds_of(times_on(Device({mul(8): 3.0}), tmp_path), reply((mul(8), 1.0, 1)))
    later = Device({})
    assert seconds_of(times_on(later, tmp_path), reply((mul(8), 1.0, 1))) == 3.5
    assert later.asked == []


def test_what_cannot_be_run_is_tried_again_by_another_run_and_not_by_the_same(tmp_path: Path) -> None:
    first, second = Device({mul(8): None}), Device({mul(8): 3.0})
    times = times_on(first, tmp_path)
    assert [seconds_of(times, reply((mul(8), 1.0, 1))) for _ in range(2)] == [1.5, 1.5]
    assert first.asked == [[mul(8)]]
    assert seconds_of(times_on(second, tmp_path), reply((mul(8), 1.0, 1))) == 3.5


def test_a_device_that_measures_nothing_leaves_predicted_times_and_a_reason(tmp_path: Path) -> None:
    def broken(calls: Sequence[str]) -> Mapping[str, float | None]:
        raise AutotuneError(f"{len(calls)} operators were lost")

    times = OperatorTimes("cpu", broken, Cache(tmp_path), "0" * 32)
    assert seconds_of(times, reply((mul(8), 1.0, 1))) == 1.5
    assert times.failure == "1 operators were lost"


def test_traces_without_operators_and_failed_ones_stay_as_they_are(tmp_path: Path) -> None:
    device = Device({})
    found: list[Traced] = [replace(reply(), operators=()), Untraceable("no")]
    assert times_on(device, tmp_path).with_measured_times(found) == found
    assert device.asked == []
