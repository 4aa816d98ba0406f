"""``--prompt-coverage`` from the command line to ``trl grpo``, in real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from datasets import load_dataset

from tests.end_to_end.runs import Ended, autotune
from tests.small import write_rows

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SPACE = """
trainer: grpo
techniques:
  gradient_checkpointing: ["on", "off"]
  precision: [float32]
"""
SIZES = ("max_completion_length=8", "num_generations=2", "per_device_train_batch_size=4")
LONG = 7
"""The row, from 0 on, that is longer than all others."""
ROWS = [
    {"prompt": " ".join(["memory"] * (150 if place == LONG else 3 + place % 9)), "solution": f"{place}"}
    for place in range(40)
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, small_model_directory: Path) -> tuple[Ended, Path]:
    folder = tmp_path_factory.mktemp("found")
    (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
    rows = write_rows(folder / "rows.jsonl", ROWS)
    words = ("--trainer", "grpo", "--prompt-coverage", "0.97", "--device", "cpu", "--effort", "quick", "--no-plan")
    fixed = [word for size in SIZES for word in ("--fix", size)]
    more = ("--space", "space.yaml", "--trials", "2", "--global-batch-size", "4", "--json", "--output", "bundle")
    return autotune("probe", small_model_directory, rows, *words, *fixed, *more, folder=folder), folder / "bundle"


def test_what_was_dropped_is_told_and_part_of_the_result(found: tuple[Ended, Path]) -> None:
    ended, _ = found
    assert ended.code == 0, ended.err
    dropped = ended.document["workload"]["dataset"]["dropped"]
    assert (dropped["rows"], [number for number, _ in dropped["longest"]]) == (1, [LONG + 1])
    note = next(note for note in ended.document["notes"] if note.startswith("--prompt-coverage 0.97"))
    assert "drops 1 of the 40 prompts" in note
    assert f"row {LONG + 1} ({dropped['longest'][0][1]} tokens)" in note
    assert note in " ".join(ended.err.split())


def test_the_bundle_has_the_other_rows_as_they_were(found: tuple[Ended, Path]) -> None:
    _, bundle = found
    rows = load_dataset("parquet", data_files=str(bundle / "rows.parquet"), split="train")
    assert rows.to_list() == [row for place, row in enumerate(ROWS) if place != LONG]


@pytest.mark.parametrize("script", [False, True], ids=["trl", "script"])
def test_training_starts_with_them_unchanged(script: bool, found: tuple[Ended, Path]) -> None:
    _, bundle = found
    trl = [str(Path(sys.executable).with_name("trl")), "grpo", "--config", str(bundle / "config.yaml")]
    words = [*([sys.executable, "train.py"] if script else trl), "--max_steps", "2", "--report_to", "none"]
    done = subprocess.run(words, cwd=bundle, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
