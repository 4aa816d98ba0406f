"""A new technique is one file, a new trainer two and a search space; every command then has them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.new_trainer import ADAPTER, SAMPLES, SEARCH_SPACE, SPECIFICATION
from tests.end_to_end.runs import ROOT, autotune, checkout
from tests.small import long_tailed_texts, write_rows

TECHNIQUE = '''
"""``weight_decay``: a technique that exists in this test only."""

from autotune.techniques.base import Option, Technique


class WeightDecay(Technique):
    """A knob for the test."""

    summary = "Shrinks weights a little at every step."
    options = (Option("off", "no decay"), Option("on", "a decay of 0.1"))
    trl_default = "off"
    writes = frozenset({"args.weight_decay"})

    def plan(self, choice, candidate, setting):
        """Write the decay."""
        return {"args.weight_decay": 0.1 if choice == "on" else 0.0}
'''


CONFORMANCE = sorted(file.name for file in (ROOT / "tests" / "trainers").glob("test_conformance*.py"))


@pytest.fixture(scope="module")
def with_trainer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the files of a trainer and of a technique."""
    files = {
        "autotune/trainers/toy.py": SPECIFICATION,
        "autotune/step/trainers/toy.py": ADAPTER,
        "autotune/techniques/weight_decay.py": TECHNIQUE,
        "search_spaces/toy.yaml": SEARCH_SPACE,
    }
    return checkout(tmp_path_factory.mktemp("checkout"), files)


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions and answers of many lengths."""
    texts = long_tailed_texts(80, median_words=12, longest_words=80)
    rows = [{"question": question, "answer": answer} for question, answer in zip(texts[:40], texts[40:], strict=True)]
    return write_rows(tmp_path_factory.mktemp("data") / "pairs.jsonl", rows)


def conformance(with_trainer: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the conformance suite of the copy."""
    files = [str(Path("tests", "trainers", name)) for name in CONFORMANCE]
    chosen = ["-q", "-p", "no:cacheprovider", "-k", "toy or specification", *files, *words]
    line = [sys.executable, "-m", "pytest", *chosen]
    environment = {**os.environ, "PYTHONPATH": str(with_trainer)}
    return subprocess.run(line, cwd=with_trainer, env=environment, capture_output=True, text=True, check=False)


def test_the_technique_is_in_the_help_and_among_those_of_a_trainer_whose_fields_it_has(with_trainer: Path) -> None:
    ended = autotune("techniques", "--trainer", "toy", "--json", folder=with_trainer, root=with_trainer)
    assert ended.code == 0, ended.err
    assert {"max_length", "gradient_checkpointing", "weight_decay"} <= {row["knob"] for row in ended.document}
    assert "weight_decay" in autotune("probe", "--help", folder=with_trainer, root=with_trainer).out


def test_a_misspelling_of_either_is_answered_with_its_name(with_trainer: Path) -> None:
    ended = autotune("techniques", "--trainer", "toi", folder=with_trainer, root=with_trainer)
    assert ended.code == 2
    assert "sft" in ended.err
    assert "toy" in ended.err
    misspelled = autotune("probe", "m", "d", "--fix", "weight_decy=on", folder=with_trainer, root=with_trainer)
    assert misspelled.code == 2
    assert "Did you mean 'weight_decay'" in misspelled.err


@pytest.mark.nightly
@pytest.mark.slow
def test_the_dataset_of_a_trainer_is_measured_by_the_columns_that_it_takes(
    with_trainer: Path, small_model_directory: Path, rows_file: Path, small_dataset_file: Path, tmp_path: Path
) -> None:
    words = ("lengths", small_model_directory, rows_file, "--trainer", "toy", "--json")
    ended = autotune(*words, folder=tmp_path, root=with_trainer)
    assert ended.code == 0, ended.err
    others = ("lengths", small_model_directory, small_dataset_file, "--trainer", "toy")
    refused = autotune(*others, folder=tmp_path, root=with_trainer)
    assert refused.code == 2
    assert "question and answer" in refused.err


@pytest.mark.nightly
@pytest.mark.slow
def test_a_trainer_is_asked_for_sample_rows_and_passes_the_suite_once_it_has_them(with_trainer: Path) -> None:
    without = conformance(with_trainer, "-k", "toy and default_is_probed")
    assert without.returncode == 1
    assert "no sample rows of toy's format 'question+answer': add them to SAMPLES" in without.stdout
    samples = with_trainer / "tests" / "trainers" / "samples.py"
    samples.write_text(samples.read_text(encoding="utf-8") + SAMPLES, encoding="utf-8")
    ended = conformance(with_trainer)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.nightly
@pytest.mark.slow
def test_the_memory_of_a_trainer_is_planned_for_a_gpu_that_is_not_here(
    with_trainer: Path, small_model_directory: Path, rows_file: Path, tmp_path: Path
) -> None:
    fixed = ("--fix", "max_length=coverage", "--fix", "per_device_train_batch_size=2")
    words = ("plan", small_model_directory, rows_file, "--trainer", "toy", "--gpu", "24GiB", *fixed, "--json")
    ended = autotune(*words, folder=tmp_path, root=with_trainer)
    assert ended.code == 0, ended.err
    traced = [item for item in ended.document["estimates"] if item["origin"] == "traced"]
    assert traced
    assert all(item["memory"]["peak_bytes"] > 0 for item in traced)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_trainer_is_probed_with_the_technique_and_its_bundle_is_written(
    with_trainer: Path, small_model_directory: Path, rows_file: Path, tmp_path: Path
) -> None:
    file = tmp_path / "space.yaml"
    file.write_text('techniques:\n  max_length: [coverage]\n  weight_decay: ["off", "on"]\n', encoding="utf-8")
    words = ("probe", small_model_directory, rows_file, "--trainer", "toy", "--device", "cpu", "--effort", "quick")
    more = ("--space", file, "--trials", "4", "--json", "--output", "out")
    ended = autotune(*words, *more, folder=tmp_path, root=with_trainer)
    assert ended.code == 0, ended.err
    assert {"off", "on"} <= {trial["candidate"]["weight_decay"] for trial in ended.document["trials"]}
    assert {trial["status"] for trial in ended.document["trials"]} <= {"ok", "vetoed"}
    assert ended.document["trainer"] == "toy"
    assert {"result.json", "train.py"} <= {file.name for file in (tmp_path / "out").iterdir()}
    assert not (tmp_path / "out" / "config.yaml").exists()
    script = (tmp_path / "out" / "train.py").read_text(encoding="utf-8")
    assert "weight_decay" in script
    compile(script, "train.py", "exec")
