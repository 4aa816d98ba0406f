"""The division of a plan's processes among machines, and the network between them (``--network``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import autotune
from autotune.app.notes import notes_on_processes
from autotune.app.planned import machines_of, planned_machine
from autotune.core.documents.estimate import Plan
from autotune.core.plan import Launch
from autotune.errors import InputError
from autotune.inspection import machine as of_machine
from autotune.inspection.gpus import find_gpu
from tests.settings import CPU, GPU, machine_with

BYTES = 400e9 / 8
"""Bytes per second of 400 Gbit/s."""
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 8}, "between machines, and there is one machine"),
        ({"num_processes": 16, "num_machines": 1}, "between machines, and there is one machine"),
        ({}, "between machines, and there is one machine"),
        ({"num_processes": 16, "gpu": "24GiB"}, "The speed of 24GiB is not known"),
        ({"num_processes": 16, "gpu": "cpu"}, "The speed of .* is not known"),
        ({"num_processes": 16, "network": 0}, "A network of 0 Gbit/s is not possible"),
        ({"num_processes": 16, "network": -400.0}, "A network of -400 Gbit/s is not possible"),
        ({"num_processes": 16, "network": float("inf")}, "A network of inf Gbit/s is not possible"),
        ({"num_processes": 16, "network": float("nan")}, "A network of nan Gbit/s is not possible"),
    ],
)
def test_a_network_that_changes_nothing_is_refused(model: str, options: Mapping[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        autotune.plan(model, seq_len=64, **{"gpu": "T4", "network": 400, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [8, 12])
def test_a_network_is_refused_for_numbers_of_gpus_that_one_machine_has(model: str, batch: int) -> None:
    with pytest.raises(InputError, match="between machines, and there is one machine"):
        autotune.rent(model, seq_len=64, num_processes="auto", global_batch_size=batch, network=400)


def test_a_network_is_that_of_each_machine_in_bytes_per_second_and_one_machine_has_none() -> None:
    found = {count: planned_machine("H100-SXM", count, network=400).device.speeds for count in (1, 8, 16, 32)}
    assert [speeds and speeds.network for speeds in found.values()] == [None, None, BYTES, BYTES]
    assert planned_machine("H100-SXM", 16).device == find_gpu("H100-SXM")


def test_it_is_said_what_the_time_between_machines_is() -> None:
    gpus = [find_gpu("H100-SXM")]
    without, given = (list(notes_on_processes(32, 4, network, gpus)) for network in (None, 3200.0))
    assert "as if all GPUs were in one machine, which is a lower bound. --network names its Gbit/s." in without[-1]
    assert "a network of 3200 Gbit/s for each machine" in given[-1]
    assert len(list(notes_on_processes(8, 1, None, []))) == 1


@pytest.mark.parametrize(
    ("processes", "machines", "unlinked"),
    [(1, 1, ""), (2, 2, ""), (2, 1, "L4"), (4, 2, "L4"), (4, 1, "L4, H100-PCIe"), (8, 2, "L4, H100-PCIe")],
)
def test_gpus_of_a_machine_that_nvlink_does_not_join_have_a_note(processes: int, machines: int, unlinked: str) -> None:
    gpus = [find_gpu(name) for name in ("L4", "H100-PCIe", "H100-SXM", "24GiB")]
    found = [text for text in notes_on_processes(processes, machines, None, gpus) if "goes over PCIe" in text]
    assert [text.split(" of a machine")[0] for text in found] == ([f"Between {unlinked}"] if unlinked else [])


@pytest.mark.nightly
def test_a_plan_is_the_slower_the_slower_its_network_and_as_fast_as_one_machine_at_best(
    model: str, tmp_path: Path
) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("trainer: sft\ntechniques: {sharding: [fsdp2], dp_replicate_size: [1, 2]}\n", encoding="utf-8")
    fixed = {"gradient_checkpointing": "off", "precision": "float32", "attention": "sdpa", "sharding": "fsdp2"}

    def planned(network: float | None) -> Plan:
        return autotune.plan(
            model, seq_len=64, gpu="H100-SXM", num_processes=16, global_batch_size=128, space=space, network=network,
            fix=fixed,
        )  # fmt: skip

    def rates(plan: Plan) -> dict[object, float]:
        return {found.candidate["dp_replicate_size"]: found.tokens_per_second or 0.0 for found in plan.estimates}

    alone, fastest, fast, slow = (rates(planned(network)) for network in (None, 1e9, 10.0, 0.1))
    assert alone == fastest
    for replicas in (1, 2):
        assert alone[replicas] >= fast[replicas] > slow[replicas]
    # Shards of one machine are not gathered over the network, which decides where it takes most of a step.
    assert slow[2] > slow[1]


@pytest.fixture
def eight_gpus_here(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"auto": machine_with(GPU, processes=8), "cpu": CPU}
    monkeypatch.setattr("autotune.app.planned.inspect_machine", lambda device, *_: here[device])


@pytest.mark.parametrize(("processes", "machines"), [(1, 1), (6, 1), (8, 1), (12, 2), (16, 2), (24, 3), (64, 8)])
def test_a_machine_has_at_most_eight_processes(processes: int, machines: int) -> None:
    assert machines_of(processes, None) == machines


@pytest.mark.parametrize("processes", [9, 11, 20, 22])
def test_processes_that_such_machines_cannot_share_out_equally_are_refused(processes: int) -> None:
    with pytest.raises(InputError, match=f"{processes} processes cannot be divided among .* of at most 8") as refused:
        machines_of(processes, None)
    assert "--num-machines" in str(refused.value.hint)


@pytest.mark.parametrize("machines", [0, 2, 3])
def test_the_cpu_is_that_of_one_machine(machines: int) -> None:
    with pytest.raises(InputError, match=f"for this machine alone, and {machines} machines were asked for"):
        planned_machine("cpu", 12, machines)
    for one in (None, 1):
        assert planned_machine("cpu", 9, one).hardware.launch == Launch(9)


def test_a_number_of_machines_that_was_given_shares_them_out() -> None:
    assert machines_of(20, 4) == 4
    assert machines_of(16, 1) == 1
    for processes, counted in ((20, "20 processes"), (1, "1 process")):
        with pytest.raises(InputError, match=f"{counted} cannot be divided among 3 machines"):
            machines_of(processes, 3)


@pytest.mark.usefixtures("eight_gpus_here")
def test_without_a_gpu_that_is_named_all_that_are_visible_train_together() -> None:
    assert planned_machine(None).hardware.processes == 8


@pytest.mark.usefixtures("eight_gpus_here")
@pytest.mark.parametrize(("processes", "machines"), [(2, 1), (8, 1), (16, 2), (32, 4)])
def test_more_processes_than_this_machine_has_gpus_are_in_several_machines(processes: int, machines: int) -> None:
    assert planned_machine(None, processes).hardware.machines == machines


@pytest.mark.parametrize(("processes", "free"), [(None, 9), (1, 79), (2, 70), (3, 9), (6, 9)])
def test_a_gpu_that_others_fill_counts_where_it_trains(
    processes: int | None, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_each = tuple(replace(GPU.hardware, memory_bytes=79, used_by_others_bytes=used) for used in (0, 9, 70))
    monkeypatch.setattr(of_machine, "visible_gpus", lambda _: of_each)
    monkeypatch.setattr(of_machine, "torch_cuda_version", lambda: "13.0")
    assert planned_machine(None, processes).hardware.available_bytes == free


def test_a_machine_with_more_gpus_than_most_holds_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"auto": machine_with(GPU, processes=16), "cpu": CPU}
    monkeypatch.setattr("autotune.app.planned.inspect_machine", lambda device, *_: here[device])
    assert planned_machine(None, 16).hardware.machines == 1
