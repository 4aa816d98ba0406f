"""Rows with image files from ``autotune probe`` to two steps of TRL's command, for each trainer that takes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Dataset

from autotune.trainers import trainers
from tests.end_to_end.runs import autotune, train_with_trl
from tests.step.test_images_tokenised import of_answers, of_pairs, of_prompts, rows_of
from tests.vision import picture, write_small_vision_model

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SPACE = """
trainer: {trainer}
techniques:
  gradient_checkpointing: ["on", "off"]
  precision: [float32]
"""
ROWS: dict[str, Callable[[list[list[str]]], Dataset]] = {
    "sft": rows_of, "dpo": of_pairs, "kto": of_answers, "grpo": of_prompts, "rloo": of_prompts,
}  # fmt: skip
GROUPS = ("max_completion_length=8", "num_generations=2")


@pytest.mark.parametrize("trainer", [name for name, known in trainers().items() if known.takes_images])
def test_a_recommendation_is_confirmed_and_trains_unchanged(trainer: str, tmp_path: Path) -> None:
    model = write_small_vision_model(tmp_path / "model", "gemma3")
    files = [str(tmp_path / f"{number}.png") for number in range(16)]
    for number, file in enumerate(files):
        picture(30 + 5 * number, 90 - 4 * number).save(file)
    # GRPO takes no rows without images among those with some.
    fewest = int(trainer == "grpo")
    images = [[files[place], files[-place]][: max(fewest, place % 3)] for place in range(16)]
    ROWS[trainer](images).to_parquet(str(tmp_path / "rows.parquet"))
    (tmp_path / "space.yaml").write_text(SPACE.format(trainer=trainer), encoding="utf-8")
    words = ("--trainer", trainer, "--device", "cpu", "--effort", "quick", "--no-plan", "--memory-budget", "2GiB")
    fixed = [word for fix in (GROUPS if trainers()[trainer].generates else ()) for word in ("--fix", fix)]
    more = ("--space", "space.yaml", "--trials", "2", "--global-batch-size", "4", "--json", "--output", "bundle")
    ended = autotune("probe", model, "rows.parquet", *words, *fixed, *more, folder=tmp_path, timeout=600)
    assert ended.code == 0, ended.err
    assert (ended.document["status"], ended.document["confirmed"]) == ("found", True)
    train_with_trl(trainer, tmp_path)
