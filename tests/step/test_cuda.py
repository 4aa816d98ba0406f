"""Probes on a real GPU: the figures of the allocator and the driver, and the enforced limit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autotune.core.jobs.protocol import CheckPackingRequest, SpeedsRequest
from autotune.core.measurement import Measurement
from autotune.core.plan import TrainingPlan
from autotune.core.program import CONSTRUCTION
from autotune.core.status import ProbeStatus
from autotune.core.workload import ModelSource, Workload
from autotune.errors import InputError
from autotune.inspection.cuda import visible_gpus
from autotune.inspection.gpus import find_gpu
from autotune.probing import JobServer, check_packing, measure_speeds, probe
from autotune.units import GIB, MIB
from tests.probing import misbehaving
from tests.step.requests import plan, probe_request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


@pytest.fixture(scope="module")
def cuda_server() -> Iterator[JobServer]:
    with JobServer("cuda") as server:
        yield server


def run(
    server: JobServer, workload: Workload, folder: Path, training_plan: TrainingPlan, limit_bytes: int | None = None
) -> Measurement:
    request = probe_request(workload, training_plan, limit_bytes=limit_bytes)
    return probe(server, replace(request, device="cuda"), folder, timeout_seconds=120.0)


def on_gpu(args: dict[str, object] | None = None, rows: int = 2) -> TrainingPlan:
    return plan({"use_cpu": False, "bf16": True, "model_init_kwargs": {"device_map": None}, **(args or {})}, rows=rows)


@pytest.mark.parametrize(
    "model", [{}, {"use_peft": True, "load_in_4bit": True, "dtype": "bfloat16", "lora_target_modules": "all-linear"}]
)
def test_the_allocators_and_the_drivers_figures_are_there(
    cuda_server: JobServer, small_workload: Workload, tmp_path: Path, model: dict[str, object]
) -> None:
    measurement = run(cuda_server, small_workload, tmp_path, replace(on_gpu(), model=model))
    assert measurement.ok, measurement.reason
    assert measurement.peak_bytes is not None
    assert measurement.reserved_bytes is not None
    assert 0 < measurement.peak_bytes <= measurement.reserved_bytes
    assert measurement.device_bytes is not None
    assert measurement.device_bytes > measurement.reserved_bytes + 100 * MIB, "the context is part of it"


def test_jobs_are_forked_for_the_server_leaves_cuda_alone(tmp_path: Path) -> None:
    with JobServer("cuda", jobs_module=misbehaving.MODULE) as server:
        assert probe(server, misbehaving.request("name_its_program"), tmp_path).ok
    assert b"--worker" not in (tmp_path / misbehaving.PROGRAM_FILE).read_bytes(), "a new interpreter was started"


def test_a_smaller_card_is_emulated(cuda_server: JobServer, small_workload: Workload, tmp_path: Path) -> None:
    large = on_gpu({"max_length": None, "gradient_checkpointing": False}, rows=64)
    needed = run(cuda_server, small_workload, tmp_path / "free", large)
    assert needed.ok, needed.reason
    assert needed.peak_bytes is not None
    assert run(cuda_server, small_workload, tmp_path / "fits", large, limit_bytes=needed.peak_bytes + 2 * GIB).ok
    nothing = run(cuda_server, small_workload, tmp_path / "context", large, limit_bytes=16 * MIB)
    assert nothing.status is ProbeStatus.OUT_OF_MEMORY
    assert nothing.out_of_memory is not None
    assert nothing.out_of_memory.phase == CONSTRUCTION
    assert "the CUDA context alone holds" in nothing.reason


def test_memory_that_others_hold_is_no_result_of_a_candidate(
    cuda_server: JobServer, small_workload: Workload, tmp_path: Path
) -> None:
    total_bytes = visible_gpus()[0].memory_bytes
    held = f"import torch; held = torch.empty({total_bytes // 4}, dtype=torch.uint8, device='cuda'); print(); input()"
    with subprocess.Popen([sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(InputError, match=r"Other processes hold .* of the GPU's .* are needed for a probe"):
            run(cuda_server, small_workload, tmp_path / "held", on_gpu(), limit_bytes=total_bytes * 9 // 10)
        assert run(cuda_server, small_workload, tmp_path / "left", on_gpu(), limit_bytes=total_bytes // 2).ok
        other.communicate(b"\n")


@pytest.mark.skipif("NULLGPU_DEVICE" in os.environ, reason="compares logits, which a null GPU does not compute")
def test_the_self_test_runs_on_the_gpu(cuda_server: JobServer, small_workload: Workload, tmp_path: Path) -> None:
    request = CheckPackingRequest("sft", ModelSource(small_workload.model.name), "cuda", ("sdpa", "eager"))
    for check in check_packing(cuda_server, request, tmp_path):
        assert check.separates, check


def test_a_job_measures_what_the_host_of_a_gpu_takes_for_an_operator(cuda_server: JobServer, tmp_path: Path) -> None:
    speeds = find_gpu("H100-80GB").speeds
    assert speeds is not None
    found = measure_speeds(cuda_server, SpeedsRequest(speeds), tmp_path)
    # Hosts of rented GPUs take 40 to 56 µs; a null GPU's hook and other work on the machine take their time.
    assert 1e-6 < (found.launch_seconds or 0) < 1e-2
    assert replace(found, launch_seconds=None) == speeds
