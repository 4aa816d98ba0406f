"""Plans that a trainer refuses, possibly with sizes that no candidate has, and the teacher of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune.core.plan import Launch, TrainingPlan
from autotune.core.workload import ModelSource
from autotune.trainers import find_trainer
from autotune.trainers.distillation import TEACHER, TEACHER_REVISION, TRAINER
from tests.settings import setting, workload

GROUPS = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "num_generations": 8}


def refused(trainer: str, processes: int = 1, **args: Any) -> str | None:
    plan = TrainingPlan(trainer, args, launch=Launch(processes))
    return find_trainer(trainer).refused(plan, setting().workload)


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_a_generation_may_be_trained_on_in_several_optimizer_steps(trainer: str) -> None:
    assert "a generation batch of 4 completions" in str(refused(trainer, **GROUPS))
    alone = {**GROUPS, "per_device_train_batch_size": 1}
    assert "a generation batch of 1 completion cannot" in str(refused(trainer, **alone))
    assert refused(trainer, **GROUPS, steps_per_generation=2) is None
    assert "a generation batch of 12 completions" in str(refused(trainer, **GROUPS, steps_per_generation=3))
    assert refused(trainer, processes=2, **GROUPS) is None
    # Steps of four micro-batches, on generations of six: TRL trains so.
    uneven = {**GROUPS, "gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_iterations": 3}
    assert refused(trainer, **uneven) is None


def test_the_prompts_of_a_generation_are_counted_however_many_steps_it_is_for() -> None:
    assert refused("grpo", **GROUPS, steps_per_generation=200) is None
    assert "needs 101 prompts, and the dataset has 100" in str(refused("grpo", **GROUPS, steps_per_generation=202))


def test_evaluation_may_have_groups_of_another_size() -> None:
    args: dict[str, Any] = {
        **GROUPS,
        "per_device_train_batch_size": 8,
        "eval_strategy": "epoch",
        "per_device_eval_batch_size": 4,
    }
    assert "an evaluation batch of 4 completions" in str(refused("grpo", **args))
    assert refused("grpo", **args, num_generations_eval=2) is None


def test_a_loss_without_a_kl_divergence_trains_on_single_rows() -> None:
    args: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    assert "has to be at least 2" in str(refused("kto", **args))
    assert "has to be at least 2" in str(refused("kto", **args, loss_type="kto"))
    assert refused("kto", **args, loss_type="apo_zero_unpaired") is None


SIZES = {
    TEACHER: "first",
    "max_completion_length": 16,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
}


@pytest.mark.parametrize(
    ("written", "revision", "found"),
    [({}, "main", None), ({}, "v2", "v2"), ({TEACHER_REVISION: "v1"}, "main", "main")],
)
def test_another_teacher_does_not_keep_the_revision_of_the_one_before(
    written: dict[str, object], revision: str, found: str | None
) -> None:
    plan = TrainingPlan("distillation", {**written, **SIZES})
    of = replace(workload(), teacher_source=ModelSource("second", revision=revision))
    completed = TRAINER.completed(plan, of)
    assert completed.args[TEACHER] == "second"
    assert completed.args.get(TEACHER_REVISION) == found
