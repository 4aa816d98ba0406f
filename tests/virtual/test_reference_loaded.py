"""A model and its reference in a trace: separate configurations, and an empty cache before training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from autotune.core.plan import Completions, TrainingPlan
from autotune.core.program import CONSTRUCTION
from autotune.step.run.traced_training import traced_training
from autotune.step.run.virtual_trainer import TracedRows, build_virtual
from autotune.step.trainers import find_adapter
from autotune.trainers.prompts import NO_REWARD
from autotune.virtual import trace
from autotune.virtual.recording.records import EMPTY_CACHE
from autotune.virtual.steps.phases import step_name
from tests.small import small_tokenizer
from tests.virtual.models import config_of

ARGS = {"per_device_train_batch_size": 2, "bf16": False, "max_length": 32, "report_to": "none"}
GROUPS = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "num_generations": 2, "beta": 0.04,
    "max_completion_length": 8, "bf16": False, "report_to": "none",
}  # fmt: skip
PLANS: dict[str, tuple[TrainingPlan, list[tuple[int, ...]]]] = {
    "dpo": (TrainingPlan("dpo", args=ARGS), [(8, 8, 8)] * 2),
    "kto": (TrainingPlan("kto", args=ARGS), [(8, 8)] * 2),
    "grpo": (
        TrainingPlan("grpo", args=GROUPS, rewards=(NO_REWARD,), completions=Completions(8, 8)),
        [(8, 8)] * 2,
    ),
    "online_dpo": (
        TrainingPlan(
            "online_dpo", args={**ARGS, "max_new_tokens": 8}, rewards=(NO_REWARD,), completions=Completions(8, 8)
        ),
        [(8, 8)] * 2,
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_reference_keeps_the_settings_that_trl_changes_in_the_model_that_it_trains(name: str, tmp_path: Path) -> None:
    plan, rows = PLANS[name]
    sizes, cpu = TracedRows(rows), torch.device("cpu")
    trainer: Any = build_virtual(find_adapter(name), plan, config_of("llama"), small_tokenizer(), sizes, cpu, tmp_path)

    trainer.model.config.use_cache = False

    assert trainer.ref_model.config.use_cache


def test_a_trainer_that_extends_one_of_trl_s_gets_its_reference_from_the_same_source() -> None:
    known, made = find_adapter("dpo"), object()
    extended = type("ExtendedTrainer", (known.trainer,), {"__module__": __name__})

    with mock.patch.object(known, "trainer", extended), known.loading_models_from(lambda: made):
        loaded = sys.modules[extended.__mro__[1].__module__].create_model_from_path("none")

    assert loaded is made


def test_the_cache_is_emptied_once_before_the_first_step() -> None:
    plan, rows = PLANS["dpo"]
    traced = trace(traced_training(plan, config_of("llama"), small_tokenizer(), TracedRows(rows)))

    emptied = [index for index, event in enumerate(traced.events) if event.storage == EMPTY_CACHE]

    assert len(emptied) == 1
    assert traced.phase(CONSTRUCTION).end_event <= emptied[0] <= traced.phase(step_name(0)).first_event
