"""``autotune probe --trainer reward`` from the command line to ``trl reward``, in real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.runs import Ended, autotune
from tests.small import long_tailed_texts, preference_rows, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SPACE = """
trainer: reward
techniques:
  max_length: [coverage]
  gradient_checkpointing: ["on", every_2]
  precision: [float32]
  lora: [r16]
  per_device_train_batch_size: [2, 8]
recipes:
  - {max_length: coverage, gradient_checkpointing: every_2, lora: r16}
"""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = preference_rows(long_tailed_texts(60, longest_words=80))
    margins = [{**row, "margin": index / 60} for index, row in enumerate(rows)]
    return write_rows(tmp_path_factory.mktemp("data") / "pairs.jsonl", margins)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, small_model_directory: Path, pairs: Path) -> tuple[Ended, Path]:
    folder = tmp_path_factory.mktemp("found")
    (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
    words = ("--trainer", "reward", "--device", "cpu", "--effort", "quick", "--no-plan", "--space", "space.yaml")
    less = ("--token-coverage", "0.8", "--fix", "lora=r16", "--fix", "max_length=coverage", "--trials", "3")
    ended = autotune(
        "probe", small_model_directory, pairs, *words, *less, "--json", "--output", "bundle", folder=folder
    )
    return ended, folder / "bundle"


def test_a_confirmed_recommendation_is_found(found: tuple[Ended, Path]) -> None:
    ended, bundle = found
    assert ended.code == 0, ended.err
    document = ended.document
    assert (document["status"], document["trainer"]) == ("found", "reward")
    assert document["confirmed"]
    recommended = document["recommended"]
    assert 0.8 <= recommended["token_coverage"] < recommended["row_coverage"] < 1
    assert "rows covered" in ended.err
    config = yaml.safe_load((bundle / "config.yaml").read_text(encoding="utf-8"))
    assert config["lora_task_type"] == "SEQ_CLS"


def test_trl_trains_with_the_configuration_unchanged(found: tuple[Ended, Path]) -> None:
    _, bundle = found
    trl = Path(sys.executable).with_name("trl")
    words = [str(trl), "reward", "--config", str(bundle / "config.yaml"), "--max_steps", "2", "--report_to", "none"]
    done = subprocess.run(words, cwd=bundle, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_script_trains_by_itself(found: tuple[Ended, Path]) -> None:
    _, bundle = found
    words = [sys.executable, "train.py", "--max_steps", "2", "--report_to", "none"]
    done = subprocess.run(words, cwd=bundle, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_lengths_are_shown_with_the_rows_that_each_keeps(
    small_model_directory: Path, pairs: Path, tmp_path: Path
) -> None:
    shown = autotune("lengths", small_model_directory, pairs, "--trainer", "reward", "--json", folder=tmp_path)
    assert shown.code == 0, shown.err
    limits = json.loads(shown.out)["limits"]
    assert all(limit["rows_cut"] == 0 for limit in limits)
    assert limits[0]["coverage"] < limits[0]["row_coverage"] < 1
    assert limits[-1]["coverage"] == limits[-1]["row_coverage"] == 1


def test_a_length_that_keeps_no_row_is_told(small_model_directory: Path, pairs: Path, tmp_path: Path) -> None:
    words = ("--trainer", "reward", "--device", "cpu", "--max-length", "3", "--output", "none")
    ended = autotune("probe", small_model_directory, pairs, *words, folder=tmp_path)
    assert ended.code == 2
    assert "max_length=3 leaves none of the dataset's 60 rows" in ended.err
