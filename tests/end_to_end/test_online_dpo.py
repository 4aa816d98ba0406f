"""``autotune probe --trainer online_dpo`` from the command line to ``python train.py``, in real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.runs import Ended, autotune
from tests.small import long_tailed_texts, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SPACE = """
trainer: online_dpo
techniques:
  max_new_tokens: [8]
  max_length: [96]
  gradient_checkpointing: ["on", "off"]
  precision: [float32]
  per_device_train_batch_size: [1, 2]
recipes:
  - {max_new_tokens: 8, max_length: 96, gradient_checkpointing: "off"}
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, small_model_directory: Path) -> tuple[Ended, Path]:
    folder = tmp_path_factory.mktemp("found")
    texts = long_tailed_texts(40, longest_words=30)
    prompts = write_rows(folder / "prompts.jsonl", [{"prompt": text} for text in texts])
    (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
    words = ("--trainer", "online_dpo", "--device", "cpu", "--effort", "quick", "--no-plan", "--space", "space.yaml")
    allowed = ("--allow", "max_new_tokens", "--allow", "max_length", "--global-batch-size", "4")
    rest = ("--trials", "3", "--json", "--output", "bundle")
    ended = autotune("probe", small_model_directory, prompts, *words, *allowed, *rest, folder=folder)
    return ended, folder / "bundle"


def test_a_confirmed_recommendation_is_found(found: tuple[Ended, Path]) -> None:
    ended, _ = found
    assert ended.code == 0, ended.err
    document = ended.document
    assert (document["status"], document["trainer"], document["confirmed"]) == ("found", "online_dpo", True)


def test_the_script_is_all_that_is_handed_over_and_trains_by_itself(found: tuple[Ended, Path]) -> None:
    _, bundle = found
    assert not (bundle / "config.yaml").exists()
    words = [sys.executable, "train.py", "--max_steps", "2", "--report_to", "none"]
    done = subprocess.run(words, cwd=bundle, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
