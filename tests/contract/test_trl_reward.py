"""Contract with TRL: what is said of RewardTrainer alone. Each test builds or trains the real trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.core.candidate import Candidate
from autotune.techniques.base import Technique
from autotune.trainers import find_trainer
from tests.settings import GPU, setting
from tests.small import small_config, small_tokenizer

Build = Callable[..., Any]
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """Return a function that makes a ``RewardTrainer`` on a small model from configuration fields."""
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    datasets = pytest.importorskip("datasets")

    def built(*, model: dict[str, Any] | None = None, **args: Any) -> Any:
        config = small_config()
        config.num_labels = 1
        fields = {"use_cpu": True, "bf16": False, "max_steps": 1, "report_to": "none", "save_strategy": "no"}
        return trl.RewardTrainer(
            transformers.AutoModelForSequenceClassification.from_config(config),
            args=trl.RewardConfig(str(tmp_path), **{**fields, "disable_tqdm": True, **args}),
            train_dataset=datasets.Dataset.from_dict(
                {"chosen_ids": [[5] * 9, [6] * 4], "rejected_ids": [[5] * 3, [6] * 7]}
            ),
            processing_class=small_tokenizer(),
            peft_config=trl.get_peft_config(trl.ModelConfig(**(model or {}))),
        )

    return built


def test_every_second_layer_can_be_checkpointed_and_attention_s_outputs_cannot_be_kept(build: Build) -> None:
    build(gradient_checkpointing=True, gradient_checkpointing_kwargs={"every_n_layers": 2}).train()
    with pytest.raises(ValueError, match="selective"):
        build(gradient_checkpointing=True, gradient_checkpointing_kwargs={"selective": True}).train()


def test_adapters_need_the_task_of_a_model_that_scores(build: Build) -> None:
    with pytest.raises(AttributeError, match="prepare_inputs_for_generation"):
        build(model=LORA)
    trainer = build(model={**LORA, "lora_task_type": "SEQ_CLS"})
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert [name for name in trained if "score" in name] == ["base_model.model.score.modules_to_save.default.weight"]


def test_liger_s_fused_loss_makes_a_language_model_of_it(build: Build) -> None:
    pytest.importorskip("liger_kernel")
    # Its kernels need a GPU; with the fused loss alone, only the model's forward is replaced.
    none = {"rope": False, "rms_norm": False, "swiglu": False}
    with pytest.raises(AttributeError, match="lm_head"):
        build(use_liger_kernel=True, liger_kernel_config=none).train()
    build(use_liger_kernel=True, liger_kernel_config={**none, "fused_linear_cross_entropy": False}).train()


def test_a_dataset_of_which_every_row_is_dropped_is_not_trained_on(build: Build) -> None:
    with pytest.raises(ValueError, match="num_samples=0"):
        build(max_length=3).train()


@pytest.mark.parametrize("technique", find_trainer("reward").techniques, ids=lambda item: item.name)
def test_every_choice_is_written_in_fields_that_trl_has(technique: Technique, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    reward, here = find_trainer("reward"), setting(machine=GPU)
    baseline = Candidate({item.name: item.default(here) for item in reward.techniques})
    for option in technique.options:
        plan = reward.plan(baseline.but(**{technique.name: technique.parse(option.choice, here)}), here)
        trl.RewardConfig(str(tmp_path), use_cpu=True, **plan.args)
        model = trl.ModelConfig(**plan.model)
        assert not model.use_peft or model.lora_task_type == "SEQ_CLS"
        fused = {"fused_linear_cross_entropy": False}
        assert plan.args.get("liger_kernel_config") == (fused if plan.args["use_liger_kernel"] else None)
