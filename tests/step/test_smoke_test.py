"""A tiny model is trained with a user's arguments, and those that make training fail are named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from autotune.core.configuration import Configuration
from autotune.core.jobs.protocol import SmokeTestRequest
from autotune.step.job import JobContext
from autotune.step.jobs.smoke_test import smoke_test
from autotune.trainers import trainers
from autotune.userconfig.fields import smoke_test_arguments

EVALUATED = {"eval_strategy": "epoch"}
GROUPS = {"num_generations": 8, "per_device_train_batch_size": 2}


def ended(folder: Path, trainer: str, arguments: Mapping[str, object], **more: object) -> Mapping[str, str]:
    """Return the arguments that end a training, and the errors."""
    return smoke_test(SmokeTestRequest(trainer, arguments, **more), JobContext(folder, 0.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("trainer", sorted(trainers()))
def test_every_trainer_trains_and_ends_at_an_argument_of_its_optimizer_alone(trainer: str, tmp_path: Path) -> None:
    found = ended(tmp_path, trainer, {"learning_rate": 1e-4, "adam_beta1": 2.0, "weight_decay": 0.1})
    assert found == {"adam_beta1": "ValueError: Invalid beta parameter at index 0: 2.0"}


@pytest.mark.parametrize(
    ("trainer", "arguments", "names"),
    [
        ("sft", {"per_device_train_batch_size": 0, "seed": -1}, ["per_device_train_batch_size", "seed"]),
        ("sft", {"learning_rate": math.nan, "max_grad_norm": math.inf}, ["learning_rate"]),
        # Without the first one, the second one lacks it.
        (
            "sft",
            {"lr_scheduler_kwargs": {"min_lr": "x"}, "lr_scheduler_type": "cosine_with_min_lr"},
            ["lr_scheduler_kwargs"],
        ),
        # Without either, the training ends well.
        ("sft", {**EVALUATED, "per_device_eval_batch_size": None}, ["per_device_eval_batch_size"]),
        ("reward", {**EVALUATED, "metric_for_best_model": "accuracy"}, []),
        (
            "reward",
            {**EVALUATED, "save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "no"},
            ["metric_for_best_model"],
        ),
        ("sft", {"gradient_accumulation_steps": -1, "max_length": -1}, []),
    ],
    ids=str,
)
def test_the_arguments_without_which_a_training_does_not_end_are_named(
    trainer: str, arguments: Mapping[str, object], names: list[str], tmp_path: Path
) -> None:
    assert sorted(ended(tmp_path, trainer, arguments)) == names


def test_one_process_trains_on_the_rows_of_all(tmp_path: Path) -> None:
    assert set(ended(tmp_path, "grpo", GROUPS)) == {"per_device_train_batch_size"}
    assert not ended(tmp_path, "grpo", GROUPS, processes=4)


def test_a_script_may_have_rows_to_evaluate_on_without_an_argument_for_it(tmp_path: Path) -> None:
    assert set(ended(tmp_path, "sft", {"eval_on_start": True})) == {"eval_on_start"}
    assert not ended(tmp_path, "sft", {"eval_on_start": True}, has_evaluation_rows=True)


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ({"generation_kwargs": {"custom_generate": "a/b", "trust_remote_code": True}}, ()),
        ({"generation_kwargs": {"top_k": 5}, "push_to_hub": True, "hub_token": "x"}, ("generation_kwargs",)),
        ({"output_dir": "/", "model_init_kwargs": {}, "deepspeed": "file", "temperature": 1.0}, ("temperature",)),
    ],
    ids=str,
)
def test_nothing_that_acts_outside_of_the_training_is_an_argument_of_it(
    arguments: Mapping[str, object], kept: tuple[str, ...]
) -> None:
    config = Configuration("GRPOConfig", arguments, {})
    assert tuple(smoke_test_arguments(config, arguments.keys())) == kept
