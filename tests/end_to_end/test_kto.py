"""``autotune probe --trainer kto`` from the command line to ``trl kto``, in real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.runs import Ended, autotune
from tests.small import long_tailed_texts, prompt_completion_rows, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SPACE = """
trainer: kto
techniques:
  max_length: [coverage]
  reference: [beside, precomputed]
  gradient_checkpointing: ["on", "off"]
  precision: [float32]
  per_device_train_batch_size: [2, 4]
recipes:
  - {max_length: coverage, reference: precomputed}
"""
WORDS = ("--trainer", "kto", "--device", "cpu", "--effort", "quick", "--no-plan")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = prompt_completion_rows(long_tailed_texts(60, longest_words=80))
    labelled = ({**row, "label": place % 3 > 0} for place, row in enumerate(rows))
    return write_rows(tmp_path_factory.mktemp("data") / "answers.jsonl", labelled)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, small_model_directory: Path, answers: Path) -> tuple[Ended, Path]:
    folder = tmp_path_factory.mktemp("found")
    (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
    words = (*WORDS, "--space", "space.yaml", "--trials", "4", "--global-batch-size", "4")
    ended = autotune("probe", small_model_directory, answers, *words, "--json", "--output", "bundle", folder=folder)
    return ended, folder / "bundle"


def test_a_confirmed_recommendation_is_found(found: tuple[Ended, Path]) -> None:
    ended, _ = found
    assert ended.code == 0, ended.err
    document = ended.document
    assert document["status"] == "found"
    assert document["confirmed"]
    assert document["trainer"] == "kto"
    assert {trial["candidate"]["reference"] for trial in document["trials"]} == {"beside", "precomputed"}


def test_the_batch_size_stays_since_it_would_change_training(found: tuple[Ended, Path]) -> None:
    document = found[0].document
    assert {trial["candidate"]["per_device_train_batch_size"] for trial in document["trials"]} == {4}
    (locked,) = (item for item in document["unlockable"] if item["knob"] == "per_device_train_batch_size")
    assert locked["choices"] == [2]
    assert "KL divergence" in locked["changes"]


def test_trl_trains_with_the_configuration_unchanged(found: tuple[Ended, Path]) -> None:
    _, bundle = found
    trl = Path(sys.executable).with_name("trl")
    words = [str(trl), "kto", "--config", str(bundle / "config.yaml"), "--max_steps", "2", "--report_to", "none"]
    done = subprocess.run(words, cwd=bundle, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_script_trains_by_itself(found: tuple[Ended, Path]) -> None:
    _, bundle = found
    words = [sys.executable, "train.py", "--max_steps", "2", "--report_to", "none"]
    done = subprocess.run(words, cwd=bundle, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--max-length", "2"), "leaves none of the dataset's 60 rows"),
        (("--global-batch-size", "1"), "has to be at least 2"),
    ],
)
def test_what_trl_would_refuse_or_pass_over_is_told_before_any_probe(
    words: tuple[str, ...], why: str, small_model_directory: Path, answers: Path, tmp_path: Path
) -> None:
    ended = autotune("probe", small_model_directory, answers, *WORDS, *words, folder=tmp_path)
    assert ended.code == 2
    assert why in " ".join(ended.err.split())
