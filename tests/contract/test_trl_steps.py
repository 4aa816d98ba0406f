"""Contract with TRL: an epoch of a trainer that generates has as many optimizer steps as are said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.core.documents import Documents
from autotune.core.lengths import LengthDistribution
from autotune.core.plan import Completions, TrainingPlan
from autotune.trainers import find_trainer
from tests.contract.building import built

PROMPTS = 37
FOUR = {"num_generations": 4}


@pytest.mark.parametrize(
    ("trainer", "rows", "accumulated", "fields"),
    [
        ("grpo", 4, 4, FOUR),
        ("grpo", 4, 4, {**FOUR, "steps_per_generation": 8}),
        ("grpo", 2, 3, {**FOUR, "steps_per_generation": 4}),
        ("grpo", 2, 3, {**FOUR, "steps_per_generation": 6, "num_iterations": 2}),
        ("rloo", 8, 5, {"num_generations": 8}),
        ("rloo", 4, 2, FOUR),
        ("distillation", 4, 2, {}),
    ],
    ids=str,
)
def test_an_epoch_has_the_steps_of_whole_generation_batches(
    trainer: str, rows: int, accumulated: int, fields: dict[str, Any], small_model_directory: Path, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulated, **fields}
    prompts = [{"prompt": "memory is one"}] * PROMPTS
    made = built(trainer, small_model_directory, tmp_path, rows=prompts, max_steps=-1, num_train_epochs=1, **sizes)
    values = made.set_initial_training_values(made.args, made.get_train_dataloader())

    plan = TrainingPlan(trainer, {**sizes, "max_completion_length": 4}, completions=Completions(4.0, 4.0))
    known = find_trainer(trainer)
    geometry = known.geometry(plan, Documents.of_lengths(LengthDistribution({3: PROMPTS})))
    assert plan.steps_of_epoch(geometry.rows) == values[1]
