"""Traces for CUDA in a process that has CUDA run in another process, and this one keeps CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autotune.probing import JobServer
from autotune.step.job import JobContext
from autotune.virtual import phase, trace
from autotune.virtual.engine import subprocess_trace
from autotune.virtual.engine.dispatch import UnknownShapeError
from autotune.virtual.recording.records import Trace
from tests.virtual import alone

ROOT = Path(__file__).parents[2]
_TRAIN = """
import torch
from autotune.virtual.engine import subprocess_trace
from autotune.virtual import phase, trace

WIDTH = 64

def training(device):
    model = torch.nn.Linear(WIDTH, WIDTH).to(device)
    with phase("step"):
        model(torch.empty(8, WIDTH, device=device)).sum().backward()

def traced():
    found = trace(training).phase("step").device_peak.bytes
    assert found > 4 * WIDTH * WIDTH, found

def trained():
    training(torch.device("cuda"))
    torch.cuda.synchronize()

"""


def run_alone(code: str) -> None:
    """Run code in a process in which nothing was traced before."""
    command = [sys.executable, "-W", "ignore", "-c", _TRAIN + code]
    # A null GPU's hook, which lets autograd's threads end before the interpreter does, is found by PYTHONPATH.
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=200)

    assert run.returncode == 0, run.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none")
@pytest.mark.parametrize("order", ["traced(); trained()", "trained(); traced(); trained()", "traced(); traced()"])
def test_cuda_works_after_a_trace_for_cuda(order: str) -> None:
    run_alone(order)


def iter_of_sizes() -> Iterator[int]:
    """Yield sizes; a generator cannot be pickled."""
    yield 3


def traced_beside_gpus(width: int) -> tuple[Trace, bool]:
    """Trace a training as a process with GPUs does, and return whether that registered another accelerator in it."""
    torch.cuda.device_count = lambda: 1

    def training(device: torch.device) -> None:
        with phase("step"):
            nn.Linear(width, width).to(device)(torch.empty(4, width, device=device)).sum().backward()

    return trace(training, capability=(9, 0), others=[(8, 0)]), hasattr(torch, "virtual")


@pytest.mark.nightly
def test_a_process_with_gpus_leaves_cuda_traces_to_another_and_registers_no_second_accelerator(
    job_server: JobServer,
) -> None:
    width = 32
    found, is_registered = alone.apart(job_server, traced_beside_gpus, width)

    assert not is_registered
    assert found.target == "cuda"
    assert found.phase("step").device_peak.bytes > 4 * width * width
    assert found.alike == {(8, 0)}


def execute(code: str, _: JobContext) -> alone.Pickled:
    """Run code in the process of a job."""
    exec(code, {})
    return alone.Pickled.of(None)


@pytest.fixture
def forked_beside_gpus(job_server: JobServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace as a process with GPUs does, in a process of the server's, which has imported the libraries."""

    def run(command: Sequence[str], **_: object) -> SimpleNamespace:
        ended = job_server.run(alone.JOB, alone.Pickled.of(execute, command[-1]), tmp_path / "job")
        return SimpleNamespace(returncode=ended.code)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("autotune.virtual.engine.subprocess_trace.subprocess.run", run)


@pytest.mark.usefixtures("forked_beside_gpus")
def test_what_the_traced_function_raises_is_raised_here_with_its_place() -> None:
    def shaped_by_values(device: torch.device) -> None:
        torch.empty(3, device=device).nonzero()

    with pytest.raises(UnknownShapeError, match="depends on data") as raised:
        trace(shaped_by_values)

    assert any("in shaped_by_values" in note for note in raised.value.__notes__)


def test_a_function_that_cannot_be_handed_over_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    sizes = iter_of_sizes()

    def with_a_generator(device: torch.device) -> None:
        torch.empty(next(sizes), device=device)

    with pytest.raises(subprocess_trace.PicklingError, match=r"cannot be pickled.*CUDA_VISIBLE_DEVICES"):
        trace(with_a_generator)


@pytest.mark.usefixtures("forked_beside_gpus")
def test_a_process_that_dies_is_reported() -> None:
    def dying(device: torch.device) -> None:
        os._exit(3)

    with pytest.raises(RuntimeError, match="exit status 3"):
        trace(dying)


def test_on_the_cpus_target_nothing_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    seen = []

    trace(lambda device: seen.append(device.type), target="cpu")

    assert seen == ["cpu"]
