"""The machines that a plan shares its processes out among."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.app.planned import machines_of, planned_machine
from autotune.errors import InputError
from tests.settings import CPU, GPU


@pytest.fixture
def eight_gpus_here(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"auto": replace(GPU, hardware=replace(GPU.hardware, processes=8)), "cpu": CPU}
    monkeypatch.setattr("autotune.app.planned.inspect_machine", lambda device: here[device])


@pytest.mark.parametrize(("processes", "machines"), [(1, 1), (6, 1), (8, 1), (12, 2), (16, 2), (24, 3), (64, 8)])
def test_a_machine_has_at_most_eight_processes(processes: int, machines: int) -> None:
    assert machines_of(processes, None) == machines


@pytest.mark.parametrize("processes", [9, 11, 20, 22])
def test_processes_that_such_machines_cannot_share_out_equally_are_refused(processes: int) -> None:
    with pytest.raises(InputError, match=f"{processes} processes, .*, cannot be shared out equally among") as refused:
        machines_of(processes, None)
    assert "--num-machines" in str(refused.value.hint)


def test_a_number_of_machines_that_was_given_shares_them_out() -> None:
    assert machines_of(20, 4) == 4
    assert machines_of(16, 1) == 1
    with pytest.raises(InputError, match="20 processes cannot be shared out among 3 machines"):
        machines_of(20, 3)


@pytest.mark.usefixtures("eight_gpus_here")
def test_without_a_gpu_that_is_named_all_that_are_visible_train_together() -> None:
    assert planned_machine(None).hardware.processes == 8


@pytest.mark.usefixtures("eight_gpus_here")
@pytest.mark.parametrize(("processes", "machines"), [(2, 1), (8, 1), (16, 2), (32, 4)])
def test_more_processes_than_this_machine_has_gpus_are_in_several_machines(processes: int, machines: int) -> None:
    assert planned_machine(None, processes).hardware.machines == machines


def test_a_machine_with_more_gpus_than_most_holds_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"auto": replace(GPU, hardware=replace(GPU.hardware, processes=16)), "cpu": CPU}
    monkeypatch.setattr("autotune.app.planned.inspect_machine", lambda device: here[device])
    assert planned_machine(None, 16).hardware.machines == 1
