"""The inspected machine, and the messages about missing devices or software."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from importlib import metadata
from typing import Literal

import psutil
import pytest
import torch

from autotune.core.machine import Hardware, Machine, Share
from autotune.errors import InputError
from autotune.inspection import machine as module
from autotune.inspection.cuda import NoGpuError
from autotune.inspection.machine import divide_among_workers, environment, machine
from autotune.inspection.software import installed_packages

GPU = Hardware(kind="cuda", name="Test GPU", memory_bytes=100, compute_capability=(9, 0), driver="600.1")


def no_gpu(_: str | None) -> Hardware:
    raise NoGpuError("no driver")


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "visible_gpus", lambda _: (GPU,))


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "visible_gpus", no_gpu)


def test_the_cpu_is_described_by_what_this_process_may_use() -> None:
    hardware = machine("cpu").hardware
    assert hardware.kind == "cpu"
    assert hardware.name
    assert 1 <= hardware.cores <= len(os.sched_getaffinity(0))
    assert 0 < hardware.memory_bytes <= psutil.virtual_memory().total
    assert 0 < hardware.available_bytes <= hardware.memory_bytes


@pytest.mark.usefixtures("without_gpu")
def test_without_a_gpu_auto_takes_the_cpu_and_keeps_the_reason() -> None:
    found = machine("auto")
    assert (found.hardware.kind, found.device_reason) == ("cpu", "no driver")


@pytest.mark.usefixtures("without_gpu")
def test_a_gpu_that_is_not_there_cannot_be_asked_for() -> None:
    with pytest.raises(InputError, match="'cuda' cannot be used: no driver") as caught:
        machine("cuda")
    assert "--device cpu" in caught.value.hint


def test_processes_on_a_cpu_share_its_memory_and_cores() -> None:
    alone, shared = machine("cpu").hardware, machine("cpu", 4).hardware
    assert (shared.processes, shared.memory_bytes) == (4, alone.memory_bytes // 4)
    assert shared.threads == max(1, alone.cores // 4)


@pytest.mark.parametrize(("asked", "processes"), [(None, 3), (2, 2)])
def test_processes_take_the_first_gpus_and_the_memory_of_the_fullest(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, processes: int
) -> None:
    gpus = tuple(replace(GPU, used_by_others_bytes=used) for used in (10, 30, 5))
    monkeypatch.setattr(module, "visible_gpus", lambda _: gpus)
    monkeypatch.setattr(module, "torch_cuda_version", lambda: "13.0")
    found = machine("cuda", asked).hardware
    assert (found.processes, found.available_bytes) == (processes, 70)


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "visible_gpus", lambda _: (GPU, GPU))
    monkeypatch.setattr(module, "torch_cuda_version", lambda: "13.0")
    with pytest.raises(InputError, match="3 processes need 3 GPUs, and 2 GPUs are visible"):
        machine("cuda", 3)


@pytest.mark.parametrize(
    ("visible", "processes", "workers", "groups"),
    [
        (None, None, "auto", ["0", "1", "2", "3"]),
        (None, 2, "auto", ["0,1", "2,3"]),
        (None, None, 3, ["0", "1", "2"]),
        ("7,GPU-1,5,3", 2, 1, ["7,GPU-1"]),
        (" 7, GPU-1,5,3", None, 2, ["7", "GPU-1"]),
    ],
)
def test_workers_get_gpus_of_their_own_in_the_order_in_which_they_are_visible(
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    processes: int | None,
    workers: int | Literal["auto"],
    groups: list[str],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = tuple(replace(GPU, used_by_others_bytes=used) for used in (10, 30, 5, 90))
    monkeypatch.setattr(module, "visible_gpus", lambda _: gpus)
    monkeypatch.setattr(module, "torch_cuda_version", lambda: "13.0")
    found, shares = divide_among_workers("cuda", processes, workers)
    assert shares == tuple(Share(gpus=group) for group in groups)
    assert found.hardware.processes == (processes or 1)
    used = (processes or 1) * len(groups)
    assert found.hardware.available_bytes == min(gpu.available_bytes for gpu in gpus[:used])
    assert found.hardware.cores == max(1, machine("cpu").hardware.cores // len(groups))


@pytest.mark.parametrize(
    ("processes", "workers", "message"),
    [
        (2, "auto", "Workers of 2 processes need a multiple of 2 GPUs, and 3 GPUs are visible"),
        (None, 4, "4 workers need 4 GPUs, and 3 GPUs are visible"),
        (2, 2, "2 workers of 2 processes need 4 GPUs, and 3 GPUs are visible"),
        (
            None,
            3,
            "need GPUs of one model, since measurements are compared, and these are Another GPU, Test GPU",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_rule(
    monkeypatch: pytest.MonkeyPatch, processes: int | None, workers: int | Literal["auto"], message: str
) -> None:
    monkeypatch.setattr(module, "visible_gpus", lambda _: (GPU, GPU, replace(GPU, name="Another GPU")))
    monkeypatch.setattr(module, "torch_cuda_version", lambda: "13.0")
    with pytest.raises(InputError, match=message):
        divide_among_workers("cuda", processes, workers)


def test_workers_on_a_cpu_have_equal_parts_of_its_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "core_numbers", lambda _: (0, 4, 1, 5, 2))
    whole = machine("cpu").hardware
    found, shares = divide_among_workers("cpu", None, 2)
    assert shares == (Share(cores=(0, 4)), Share(cores=(1, 5)))
    assert found.hardware.memory_bytes == whole.memory_bytes // 2
    assert found.hardware.cores <= 2
    assert divide_among_workers("cpu", None, "auto")[1] == divide_among_workers("cpu", None, None)[1] == (Share(),)
    with pytest.raises(InputError, match="3 workers of 2 processes need 6 CPU cores, and 5 can be used"):
        divide_among_workers("cpu", 2, 3)


@pytest.mark.usefixtures("with_gpu")
def test_a_gpu_is_taken_when_torch_is_built_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch_cuda_version", lambda: "13.0")
    found = machine("auto")
    assert found.hardware.name == "Test GPU"
    assert found.hardware.cores == machine("cpu").hardware.cores
    assert found.device_reason == ""
    assert environment(found)["driver"] == "600.1"


@pytest.mark.usefixtures("with_gpu")
def test_a_gpu_is_of_no_use_to_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch_cuda_version", lambda: None)
    found = machine("auto")
    assert found.hardware.kind == "cpu"
    assert "torch" in found.device_reason
    assert "not built for CUDA" in found.device_reason
    with pytest.raises(InputError, match="not built for CUDA"):
        machine("cuda")


@pytest.mark.usefixtures("with_gpu")
def test_probes_are_refused_on_the_cpu_of_a_machine_whose_gpu_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch_builds", dict)
    monkeypatch.setattr(module, "torch_cuda_version", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(InputError, match=r"1 NVIDIA GPU \(Test GPU\).*none can be used.*not built for CUDA") as caught:
        divide_among_workers("auto", None, None)
    assert "--device cpu" in caught.value.hint


@pytest.mark.parametrize(
    ("cards", "builds", "visible", "message"),
    [
        (("0000:01:00.0",), {"cuda": "13.0"}, None, r"1 NVIDIA GPU \(0000:01:00.0\), and none can be used: no driver"),
        (("a", "b"), {}, "0", r"2 NVIDIA GPUs \(a, b\), and none can be used: no driver"),
        ((), {"hip": "7.0"}, None, "torch is built for ROCm"),
        ((), {"xpu": "2026.1"}, None, "torch is built for Intel GPUs"),
        ((), {"cuda": "13.0"}, None, None),
        ((), {}, None, None),
        (("a",), {"cuda": "13.0"}, "", None),
        (("a",), {"hip": "7.0"}, "-1", None),
    ],
)
@pytest.mark.usefixtures("without_gpu")
def test_probes_run_on_the_cpu_unasked_only_without_a_gpu_or_if_it_is_hidden(
    monkeypatch: pytest.MonkeyPatch,
    cards: tuple[str, ...],
    builds: dict[str, str],
    visible: str | None,
    message: str | None,
) -> None:
    monkeypatch.setattr(module, "nvidia_cards", lambda: cards)
    monkeypatch.setattr(module, "torch_builds", lambda: builds)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert divide_among_workers("cpu", None, None)[0].device_reason == ""
    if message is None:
        assert divide_among_workers("auto", None, None)[0].hardware.kind == "cpu"
        return
    with pytest.raises(InputError, match=message):
        divide_among_workers("auto", None, None)


def test_the_environment_tells_the_versions_that_figures_depend_on() -> None:
    versions = environment(machine("cpu"))
    assert versions["python"] == platform.python_version()
    for name in ("torch", "transformers", "trl", "peft", "accelerate", "optuna"):
        assert versions[name] == metadata.version(name)
    assert "driver" not in versions


def test_software_that_is_too_old_ends_the_run_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "installed_packages", lambda: {**installed_packages(), "trl": "0.24.0"})
    with pytest.raises(InputError, match=r"trl 0\.24\.0 is installed; autotune needs trl>=1\.16,<2"):
        machine("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_driver_and_torch_agree_on_the_gpu() -> None:
    found: Machine = machine("cuda")
    hardware = found.hardware
    properties = torch.cuda.get_device_properties(0)
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    assert hardware.name == properties.name
    assert hardware.compute_capability == (properties.major, properties.minor)
    assert hardware.memory_bytes == pytest.approx(total_bytes, rel=0.01)
    assert hardware.used_by_others_bytes == pytest.approx(total_bytes - free_bytes, abs=0.01 * total_bytes)
    assert hardware.driver
