"""The bundle of a search from the user's file: the file with its comments, and the same values in Python."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.api.probe import ProbeResult
from autotune.core.documents.result import BaseFile, Result
from autotune.core.workload import DatasetSource
from autotune.emit.bundle import write_bundle
from tests.emit.bundles import arguments_in, text_of
from tests.reporting.examples import a_result, a_workload
from tests.step.plans import needs_deepspeed

TEXT = "# mine\nmodel_name_or_path: m\nlearning_rate: 1e-4  # tried others\ndatasets: [{path: x}]\npacking: true\n"


def own(**changes: object) -> Result:
    """Return a result of a run that started from a file."""
    base = BaseFile(
        "mine.yaml",
        text=TEXT,
        args={"learning_rate": 1e-4, "packing": True, "eval_strategy": "steps"},
        further={"model_name_or_path": "m", "datasets": [{"path": "x"}], "model_revision": "v2"},
        env={"WANDB_PROJECT": "mine"},
    )
    return replace(a_result(), base=replace(base, **changes))  # type: ignore[arg-type]  # fields by name


def test_the_file_stands_below_what_was_measured(tmp_path: Path) -> None:
    write_bundle(own(), tmp_path)
    text = (tmp_path / "config.yaml").read_text(encoding="utf-8")
    head = text.removesuffix(TEXT)
    assert head != text
    assert all(line.startswith("#") or not line for line in head.splitlines())
    assert "# Run with: trl sft --config config.yaml, in the directory in which mine.yaml is used: relative" in head
    assert "2.30x (95 % CI 2.11 to 2.51) the speed of your configuration" in " ".join(head.split())


def test_the_script_trains_with_the_user_s_own_values(tmp_path: Path) -> None:
    write_bundle(own(), tmp_path)
    script = (tmp_path / "train.py").read_text(encoding="utf-8")
    arguments = arguments_in(tmp_path / "train.py")
    assert {"learning_rate": 1e-4, "packing": True, "model_revision": "v2"}.items() <= arguments.items()
    # The script stands where the user's relative paths do not.
    assert arguments["model_name_or_path"] == "Qwen/Qwen2.5-0.5B"
    assert arguments["datasets"] == [{"path": "json", "data_files": "/data/chats.jsonl", "split": "train"}]
    assert "os.environ['WANDB_PROJECT'] = 'mine'" in script


@pytest.mark.parametrize(
    ("strategy", "when"),
    [("epoch", "at the end of each epoch"), ("steps", "by the file's eval_strategy: steps")],
)
def test_the_head_has_the_file_s_own_moments_of_evaluation(strategy: str, when: str, tmp_path: Path) -> None:
    source = DatasetSource("trl-lib/tldr", "trl-lib/tldr")
    workload = replace(a_workload(), dataset_source=source, evaluation_source=replace(source, split="test"))
    result = replace(own(args={"eval_strategy": strategy}), workload=replace(workload, evaluation=workload.dataset))
    assert result.recommended is not None
    plan = replace(result.recommended.plan, args={"eval_strategy": "epoch"})
    write_bundle(replace(result, recommended=replace(result.recommended, plan=plan)), tmp_path)
    for name in ("config.yaml", "train.py"):
        said = f"Training is evaluated on chats.jsonl {when}; eval_strategy and eval_steps change when."
        assert said in text_of(tmp_path / name)


@pytest.mark.parametrize(("trainer", "heeds"), [("dpo", True), ("sft", False)])
def test_the_script_ignores_bias_buffers_where_the_trainer_s_own_script_does(
    trainer: str, heeds: bool, tmp_path: Path
) -> None:
    result = own(further={"model_name_or_path": "m", "datasets": [{"path": "x"}], "ignore_bias_buffers": True})
    assert result.recommended is not None
    plan = replace(result.recommended.plan, trainer=trainer)
    write_bundle(replace(result, trainer=trainer, recommended=replace(result.recommended, plan=plan)), tmp_path)
    script = (tmp_path / "train.py").read_text(encoding="utf-8")
    assert ("_ddp_params_and_buffers_to_ignore" in script) == ("import torch" in script) == heeds
    assert "'ignore_bias_buffers': True" not in script
    compile(script, "train.py", "exec")


def test_the_objects_have_the_user_s_own_values() -> None:
    config = ProbeResult(own(args={"learning_rate": 1e-4, "use_cpu": True})).config
    assert config.learning_rate == 1e-4


@needs_deepspeed
def test_the_objects_have_the_engine_of_the_plan_which_the_file_leaves_to_accelerate() -> None:
    result = own(args={"learning_rate": 1e-4, "use_cpu": True, "deepspeed": None})
    assert result.recommended is not None
    document = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
    plan = replace(result.recommended.plan, args={"use_cpu": True, "bf16": False, "deepspeed": document})
    config: Any = ProbeResult(replace(result, recommended=replace(result.recommended, plan=plan))).config
    assert config.deepspeed == document
    assert config.learning_rate == 1e-4
