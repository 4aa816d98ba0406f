"""The GPU benchmark is ready for a machine with a GPU: autotune reads the files that it writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from autotune.app.notes import TIME_ERROR_HELD
from autotune.core.files.codec import decode
from autotune.core.jobs.protocol import PrepareRequest
from autotune.core.workload import Workload
from autotune.inspection.dataset import dataset_source
from autotune.inspection.model import model_source
from autotune.probing import JobServer, prepare
from benchmarks.gpu import suite
from benchmarks.gpu.accuracy import Outcome
from benchmarks.gpu.accuracy_report import brief, details, null_summary, page, summary
from benchmarks.gpu.again import head_of
from benchmarks.shapes import CONFIGURATIONS, write_model, write_rows

ROOT = Path(__file__).resolve().parents[2]
# From the models' cards on the Hub.
PARAMETERS = {
    "qwen2.5-0.5b": 0.494e9, "qwen2.5-1.5b": 1.54e9, "qwen2.5-7b": 7.62e9, "llama-3.2-1b": 1.236e9,
    "qwen3-0.6b": 0.596e9, "gemma-3-1b": 1.0e9, "smollm2-135m": 0.1345e9, "olmoe-1b-7b": 6.92e9,
}  # fmt: skip


def prepared(server: JobServer, shape: str, lengths: Iterable[int], folder: Path) -> Workload:
    """Return a shape and rows of some lengths as autotune reads them."""
    configuration = CONFIGURATIONS[shape]
    model = write_model(folder / shape, configuration)
    rows = write_rows(folder / "rows.jsonl", lengths, configuration["vocab_size"])
    source = model_source(str(model), "random")
    request = PrepareRequest(source, dataset_source(str(rows)), "sft", str(folder / "tokenized"))
    return prepare(server, request, folder / "prepare")


@pytest.mark.parametrize("shape", CONFIGURATIONS)
def test_a_shape_is_a_model_of_the_published_size(shape: str, tmp_path: Path, job_server: JobServer) -> None:
    reply = prepared(job_server, shape, [8], tmp_path)
    assert reply.model.parameters == pytest.approx(PARAMETERS[shape], rel=0.01)
    assert reply.model.layers == CONFIGURATIONS[shape]["num_hidden_layers"]


def test_the_lengths_of_its_rows_have_a_long_tail(tmp_path: Path, job_server: JobServer) -> None:
    lengths = prepared(job_server, min(CONFIGURATIONS), suite.long_tailed_lengths(), tmp_path).dataset.lengths
    assert lengths.longest > 10 * lengths.quantile(0.25)


def test_every_search_is_of_a_shape_that_there_is() -> None:
    assert {search.shape for search in suite.SEARCHES} <= CONFIGURATIONS.keys()


def test_without_a_gpu_it_says_so_and_ends_with_2() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.suite"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Device 'cuda' cannot be used" in done.stderr
    assert "Traceback" not in done.stderr


RESULTS = sorted((ROOT / "benchmarks" / "gpu" / "results").glob("NVIDIA-*-predicted.json"))


def _devices() -> dict[str, list[list[Outcome]]]:
    """Return the outcomes on each machine, by its kind of GPU."""
    devices: dict[str, list[list[Outcome]]] = defaultdict(list)
    for one in (json.loads(file.read_text(encoding="utf-8")) for file in RESULTS):
        devices[one["device"].split()[1]].append([decode(Outcome, case) for case in one["cases"]])
    return devices


@pytest.mark.parametrize(("document", "sentence"), [("docs/accuracy.md", summary), ("README.md", brief)])
def test_the_documentation_has_the_figures_of_all_gpus(document: str, sentence: Callable[..., str]) -> None:
    text = " ".join((ROOT / document).read_text(encoding="utf-8").split())
    assert sentence(_devices()) in text


def test_the_page_on_accuracy_has_the_details_of_all_gpus() -> None:
    text = " ".join((ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8").split())
    assert " ".join(details(_devices()).split()) in text


def test_a_plan_says_of_how_many_of_these_steps_its_error_of_time_held() -> None:
    text, devices = summary(_devices()), " and an ".join(_devices())
    found = re.search(r"(\d+ of \d+) are within the stated 25%, on the (worst of 3 machines \d+ of \d+)", text)
    assert found
    assert f"{found[1]} TRL steps measured on an {devices} (on the {found[2]})" in TIME_ERROR_HELD


def test_the_documentation_has_how_far_a_null_gpu_is_from_that_gpu() -> None:
    (null,) = RESULTS[-1].parent.glob("null-*-predicted.json")
    real, other = (
        [decode(Outcome, case) for case in json.loads(file.read_text(encoding="utf-8"))["cases"]]
        for file in (RESULTS[-1], null)
    )
    text = " ".join((ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8").split())
    assert null_summary("H200", real, other) in text


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_the_page_of_a_gpu_is_that_of_its_data(file: Path) -> None:
    found = json.loads(file.read_text(encoding="utf-8"))
    measured = file.with_name(f"{file.stem}-operators.json")
    times = json.loads(measured.read_text(encoding="utf-8")) if measured.exists() else {}
    shown = file.with_suffix(".md").read_text(encoding="utf-8")
    outcomes = [decode(Outcome, case) for case in found["cases"]]
    assert shown == page(*head_of(shown), outcomes, times)
