"""``trl`` accepts the ``config.yaml`` of a bundle and starts the measured training; refused ones are not written."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands import launch
from accelerate.commands.config import config_args
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from trl.cli.accelerate_config import resolve_accelerate_config_argument

from autotune.core.plan import Completions, Launch, TrainingPlan
from autotune.emit.bundle import write_bundle
from autotune.emit.launch import ACCELERATE
from autotune.trainers import find_trainer
from tests.emit.bundles import recommending, text_of

GENERATING = pytest.mark.parametrize("trainer", ["grpo", "rloo"])


def eight(trainer: str, **args: object) -> TrainingPlan:
    """Return the plan of eight processes, each with one prompt's completion to a micro-batch."""
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "num_generations": 8}
    return TrainingPlan(
        trainer,
        {"use_cpu": True, "bf16": False, "max_completion_length": 16, **sizes, **args},
        launch=Launch(8),
        rewards=("accuracy_reward",),
        completions=Completions(8, 12),
    )


@GENERATING
@pytest.mark.parametrize(
    ("args", "taken"),
    [
        ({}, True),
        ({"num_generations": 2}, True),
        ({"steps_per_generation": 1, "num_generations": 2}, True),
        ({"gradient_accumulation_steps": 8}, True),
        ({"num_generations": 2, "eval_strategy": "epoch", "per_device_eval_batch_size": 1}, False),
        ({"num_generations": 2, "eval_strategy": "epoch", "per_device_eval_batch_size": 4}, True),
        (
            {
                "num_generations": 2,
                "num_generations_eval": 4,
                "eval_strategy": "epoch",
                "per_device_eval_batch_size": 2,
            },
            False,
        ),
    ],
    ids=str,
)
def test_trl_s_command_takes_what_one_process_alone_could_evaluate(
    trainer: str, args: dict[str, object], taken: bool, tmp_path: Path
) -> None:
    plan = eight(trainer, **args)
    assert find_trainer(trainer).runs_by_command(plan) == taken
    write_bundle(recommending(plan), tmp_path)
    assert (tmp_path / "config.yaml").exists() == taken
    assert (tmp_path / "accelerate.yaml").exists()
    # What the command reads first, where no other process has been started yet.
    parser = importlib.import_module(f"trl.scripts.{trainer}").make_parser()
    words = find_trainer(trainer).written_args(plan)
    parser.set_defaults_with_config(output_dir=str(tmp_path), **words)
    if taken:
        config = parser.parse_args_into_dataclasses([])[1]
        steps = int(str(plan.args.get("steps_per_generation", plan.args["gradient_accumulation_steps"])))
        assert config.generation_batch_size == steps * (8 if "generation_batch_size" in words else 1)
        written = yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf-8"))
        assert {name: written.get(name) for name in words} == dict(words)
        return
    with pytest.raises(ValueError, match="divisible by"):
        parser.parse_args_into_dataclasses([])


@GENERATING
def test_the_script_says_why_there_is_none_and_how_it_is_started_itself(trainer: str, tmp_path: Path) -> None:
    evaluated = {"num_generations": 2, "eval_strategy": "epoch", "per_device_eval_batch_size": 1}
    write_bundle(recommending(eight(trainer, **evaluated)), tmp_path)
    said = text_of(tmp_path / "train.py")
    assert "accelerate launch --config_file accelerate.yaml train.py" in said
    assert "of one process alone in an evaluation (per_device_eval_batch_size) do not form whole groups" in said


@pytest.fixture(params=["MULTI_GPU", "DEEPSPEED", "FSDP", "NO"])
def users_default(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user once answered to ``accelerate config``, which accelerate takes where no file is named."""
    document = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": request.param, "mixed_precision": "bf16",
        "num_processes": 4, "num_machines": 1, "gpu_ids": "2,3", "dynamo_config": {"dynamo_backend": "INDUCTOR"},
        "deepspeed_config": {"zero_stage": 2}, "fsdp_config": {"fsdp_version": 2},
    }  # fmt: skip
    file = tmp_path / "default_config.yaml"
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    for module, name in ((launch, "default_config_file"), (config_args, "default_config_file")):
        monkeypatch.setattr(module, name, str(file))


def started(config: Path) -> Any:
    """Return what ``trl sft --config`` hands on to accelerate, as that reads it."""
    parser = importlib.import_module("trl.scripts.sft").make_parser()
    words = ["--config", str(config), "--output_dir", str(config.parent)]
    *_, further = parser.parse_args_and_config(words, return_remaining_strings=True)
    return of_accelerate(*resolve_accelerate_config_argument(further))


def of_accelerate(*words: str) -> Any:
    """Return the options of ``accelerate launch``, as it reads them."""
    return launch._validate_launch_command(launch.launch_command_parser().parse_args([*words, "sft.py"]))[0]


@pytest.mark.usefixtures("users_default")
def test_one_process_is_started_as_it_was_measured_whatever_the_user_s_default_is(tmp_path: Path) -> None:
    write_bundle(recommending(TrainingPlan("sft", {"use_cpu": True, "bf16": False})), tmp_path)
    read = started(tmp_path / "config.yaml")
    assert read.num_processes == 1
    chosen = (read.multi_gpu, read.use_deepspeed, read.use_fsdp, read.use_parallelism_config)
    assert not any(chosen)
    _, environment = prepare_simple_launcher_cmd_env(read)
    assert environment["ACCELERATE_MIXED_PRECISION"] == "no"
    assert environment["ACCELERATE_DYNAMO_BACKEND"] == "NO"
    assert read.gpu_ids == "all"


@pytest.mark.usefixtures("users_default")
def test_several_processes_are_started_from_any_directory_as_by_the_bundle_s_own_file(tmp_path: Path) -> None:
    write_bundle(recommending(TrainingPlan("sft", {"use_cpu": True, "bf16": False}, launch=Launch(3))), tmp_path)
    assert str(tmp_path) not in (tmp_path / "config.yaml").read_text(encoding="utf-8")
    by_name, by_file = started(tmp_path / "config.yaml"), of_accelerate("--config_file", str(tmp_path / ACCELERATE))
    environment = prepare_multi_gpu_env(by_name)
    assert environment == prepare_multi_gpu_env(by_file)
    assert (by_name.nproc_per_node, environment["ACCELERATE_MIXED_PRECISION"]) == ("3", "no")
