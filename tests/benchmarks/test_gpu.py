"""The benchmark for GPUs is ready for a machine that has one: what it writes, autotune reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autotune.core.protocol import PrepareRequest
from autotune.inspection.dataset import dataset_source
from autotune.inspection.model import model_source
from autotune.probing import JobServer, prepare
from benchmarks import gpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("shape", gpu.SHAPES, ids=lambda shape: shape.name)
def test_a_shape_and_its_rows_are_a_workload(shape: gpu.Shape, tmp_path: Path, job_server: JobServer) -> None:
    model = gpu.write_model(tmp_path / shape.name, shape.config)
    rows = gpu.write_rows(tmp_path / "rows.jsonl", shape.config["vocab_size"])
    request = PrepareRequest(
        model_source(str(model), "random"), dataset_source(str(rows)), "sft", str(tmp_path / "tokenized")
    )
    reply = prepare(job_server, request, tmp_path / "prepare")
    assert reply.model.layers == shape.config["num_hidden_layers"]
    assert reply.dataset.lengths.longest > 10 * reply.dataset.lengths.quantile(0.25)


def test_the_shapes_have_the_published_numbers_of_parameters(tmp_path: Path, job_server: JobServer) -> None:
    published = {"qwen2.5-0.5b": 0.494e9, "qwen2.5-1.5b": 1.54e9, "qwen2.5-7b-lora": 7.62e9}
    for shape in gpu.SHAPES:
        model = gpu.write_model(tmp_path / shape.name, shape.config)
        rows = gpu.write_rows(tmp_path / "rows.jsonl", shape.config["vocab_size"])
        request = PrepareRequest(
            model_source(str(model), "random"), dataset_source(str(rows)), "sft", str(tmp_path / "tokenized")
        )
        parameters = prepare(job_server, request, tmp_path / "prepare").model.parameters
        assert abs(parameters / published[shape.name] - 1) < 0.01


def test_without_a_gpu_it_says_so_and_ends_with_2() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Device 'cuda' cannot be used" in done.stderr
    assert "Traceback" not in done.stderr
