"""Adding a trainer is adding two files and a search space: it is planned, probed and held to the conformance suite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.new_trainer import ADAPTER, SAMPLES, SEARCH_SPACE, SPECIFICATION
from tests.end_to_end.runs import ROOT, autotune
from tests.small import long_tailed_texts, write_rows

CONFORMANCE = sorted(file.name for file in (ROOT / "tests" / "trainers").glob("test_conformance*.py"))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with two more files, a search space, and sample rows for the tests."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("autotune", "search_spaces", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "autotune" / "trainers" / "toy.py").write_text(SPECIFICATION.lstrip(), encoding="utf-8")
    (root / "autotune" / "step" / "trainers" / "toy.py").write_text(ADAPTER.lstrip(), encoding="utf-8")
    (root / "search_spaces" / "toy.yaml").write_text(SEARCH_SPACE, encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions and answers of many lengths."""
    texts = long_tailed_texts(80, median_words=12, longest_words=80)
    rows = [{"question": question, "answer": answer} for question, answer in zip(texts[:40], texts[40:], strict=True)]
    return write_rows(tmp_path_factory.mktemp("data") / "pairs.jsonl", rows)


def conformance(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the conformance suite of the copy."""
    files = [str(Path("tests", "trainers", name)) for name in CONFORMANCE]
    line = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "toy or specification",
        *files,
        *words,
    ]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    return subprocess.run(line, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


def test_its_techniques_are_those_whose_fields_it_has(checkout: Path) -> None:
    ended = autotune("techniques", "--trainer", "toy", "--json", folder=checkout, root=checkout)
    assert ended.code == 0, ended.err
    assert {"max_length", "gradient_checkpointing"} <= {row["knob"] for row in ended.document}


def test_a_misspelling_of_it_is_answered_with_its_name(checkout: Path) -> None:
    ended = autotune("techniques", "--trainer", "toi", folder=checkout, root=checkout)
    assert ended.code == 2
    assert "sft" in ended.err
    assert "toy" in ended.err


@pytest.mark.nightly
@pytest.mark.slow
def test_its_dataset_is_measured_by_the_columns_that_it_takes(
    checkout: Path, small_model_directory: Path, rows_file: Path, small_dataset_file: Path, tmp_path: Path
) -> None:
    words = ("lengths", small_model_directory, rows_file, "--trainer", "toy", "--json")
    ended = autotune(*words, folder=tmp_path, root=checkout)
    assert ended.code == 0, ended.err
    refused = autotune("lengths", small_model_directory, small_dataset_file, "--trainer", "toy", folder=tmp_path,
                       root=checkout)  # fmt: skip
    assert refused.code == 2
    assert "question and answer" in refused.err


@pytest.mark.nightly
@pytest.mark.slow
def test_it_is_asked_for_sample_rows_and_passes_the_suite_once_it_has_them(checkout: Path) -> None:
    without = conformance(checkout, "-k", "toy and default_is_probed")
    assert without.returncode == 1
    assert "no sample rows of toy's format 'question+answer': add them to SAMPLES" in without.stdout
    samples = checkout / "tests" / "trainers" / "samples.py"
    samples.write_text(samples.read_text(encoding="utf-8") + SAMPLES, encoding="utf-8")
    ended = conformance(checkout)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.nightly
@pytest.mark.slow
def test_its_memory_is_planned_for_a_gpu_that_is_not_here(
    checkout: Path, small_model_directory: Path, rows_file: Path, tmp_path: Path
) -> None:
    fixed = ("--fix", "max_length=coverage", "--fix", "per_device_train_batch_size=2")
    words = ("plan", small_model_directory, rows_file, "--trainer", "toy", "--gpu", "24GiB", *fixed, "--json")
    ended = autotune(*words, folder=tmp_path, root=checkout)
    assert ended.code == 0, ended.err
    traced = [item for item in ended.document["estimates"] if item["origin"] == "traced"]
    assert traced
    assert all(item["memory"]["peak_bytes"] > 0 for item in traced)


@pytest.mark.nightly
@pytest.mark.slow
def test_it_is_probed_and_its_bundle_is_written(
    checkout: Path, small_model_directory: Path, rows_file: Path, tmp_path: Path
) -> None:
    words = ("probe", small_model_directory, rows_file, "--trainer", "toy", "--device", "cpu", "--effort", "quick")
    ended = autotune(*words, "--trials", "3", "--json", "--output", "out", folder=tmp_path, root=checkout)
    assert ended.code == 0, ended.err
    assert {trial["status"] for trial in ended.document["trials"]} <= {"ok", "vetoed"}
    assert ended.document["trainer"] == "toy"
    assert {"result.json", "train.py"} <= {file.name for file in (tmp_path / "out").iterdir()}
    assert not (tmp_path / "out" / "config.yaml").exists()
    compile((tmp_path / "out" / "train.py").read_text(encoding="utf-8"), "train.py", "exec")
