"""``autotune probe --trainer dpo`` from the command line to ``trl dpo``, in real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.runs import Ended, autotune
from tests.small import long_tailed_texts, preference_rows, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SPACE = """
trainer: dpo
techniques:
  max_length: [coverage]
  reference: [beside, precomputed]
  gradient_checkpointing: ["on", "off"]
  precision: [float32]
  per_device_train_batch_size: [1, 2, 8]
recipes:
  - {max_length: coverage, reference: precomputed}
"""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = long_tailed_texts(60, longest_words=80)
    return write_rows(tmp_path_factory.mktemp("data") / "pairs.jsonl", preference_rows(texts))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, small_model_directory: Path, pairs: Path) -> tuple[Ended, Path]:
    folder = tmp_path_factory.mktemp("found")
    (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
    words = ("--trainer", "dpo", "--device", "cpu", "--effort", "quick", "--no-plan", "--space", "space.yaml")
    ended = autotune(
        "probe", small_model_directory, pairs, *words, "--trials", "6", "--json", "--output", "bundle", folder=folder
    )
    return ended, folder / "bundle"


def test_a_confirmed_recommendation_is_found(found: tuple[Ended, Path]) -> None:
    ended, _ = found
    assert ended.code == 0, ended.err
    document = ended.document
    assert document["status"] == "found"
    assert document["confirmed"]
    assert document["trainer"] == "dpo"
    assert {trial["candidate"]["reference"] for trial in document["trials"]} == {"beside", "precomputed"}


def test_trl_trains_with_the_configuration_unchanged(found: tuple[Ended, Path]) -> None:
    _, bundle = found
    trl = Path(sys.executable).with_name("trl")
    words = [str(trl), "dpo", "--config", str(bundle / "config.yaml"), "--max_steps", "2", "--report_to", "none"]
    done = subprocess.run(words, cwd=bundle, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_script_trains_by_itself(found: tuple[Ended, Path]) -> None:
    _, bundle = found
    words = [sys.executable, "train.py", "--max_steps", "2", "--report_to", "none"]
    done = subprocess.run(words, cwd=bundle, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
