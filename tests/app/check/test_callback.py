"""The callback stops a real trainer before its first step, or lets it train."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset
from peft import IA3Config, LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

import autotune
from autotune.errors import WillNotFit
from tests.app.check.conftest import cache_of

CLASSES: dict[str, tuple[Any, Any, dict[str, object]]] = {
    "sft": (SFTTrainer, SFTConfig, {"max_length": 32}),
    "dpo": (DPOTrainer, DPOConfig, {"max_length": 32}),
    "kto": (KTOTrainer, KTOConfig, {}),
    "reward": (RewardTrainer, RewardConfig, {}),
    "grpo": (GRPOTrainer, GRPOConfig, {"num_generations": 4, "max_completion_length": 8}),
}


def built(trainer: str, model: Path, file: Path, folder: Path, budget: str, **more: Any) -> Any:
    kind, config, own = CLASSES[trainer]
    tokenizer = AutoTokenizer.from_pretrained(model)
    head = AutoModelForSequenceClassification if trainer == "reward" else AutoModelForCausalLM
    loaded = head.from_pretrained(model, **({"num_labels": 1} if trainer == "reward" else {}))
    if trainer == "reward":
        loaded.config.pad_token_id = tokenizer.pad_token_id
    plain = {"use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 1}
    args = config(output_dir=str(folder), **{**plain, **own, **more.pop("options", {})})
    if trainer == "grpo":
        more["reward_funcs"] = lambda completions, **_: [0.0] * len(completions)
    return kind(
        model=loaded,
        args=args,
        processing_class=tokenizer,
        train_dataset=load_dataset("json", data_files=str(file), split="train"),
        callbacks=[autotune.PreflightCallback(memory_budget=budget)],
        **more,
    )


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_of(tmp_path_factory)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer",
    [pytest.param(name, marks=pytest.mark.nightly) if name != "sft" else name for name in CLASSES],
)
def test_what_will_not_fit_is_stopped_before_its_first_step(
    trainer: str, small_model_directory: Path, rows: Callable[[str], Path], tmp_path: Path
) -> None:
    training = built(trainer, small_model_directory, rows(trainer), tmp_path, "1MiB")
    with pytest.raises(WillNotFit, match=r"does not fit: .* of 1.00 MiB"):
        training.train()
    assert training.state.global_step == 0


@pytest.mark.slow
def test_what_cannot_be_checked_is_trained_with_a_warning(
    small_model_directory: Path, rows: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = IA3Config(target_modules=["q_proj", "v_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    training = built("sft", small_model_directory, rows("sft"), tmp_path, "4GiB", peft_config=adapter)
    with caplog.at_level(logging.WARNING):
        training.train()
    assert training.state.global_step == 1
    assert "A IA3Config is not understood" in caplog.text


@pytest.mark.slow
@pytest.mark.nightly
def test_what_is_evaluated_is_checked_with_rows_like_those_trained_on(
    small_model_directory: Path, rows: Callable[[str], Path], tmp_path: Path
) -> None:
    evaluated = load_dataset("json", data_files=str(rows("sft")), split="train")
    options = {"eval_strategy": "steps", "eval_steps": 1}
    training = built(
        "sft", small_model_directory, rows("sft"), tmp_path, "4GiB", options=options, eval_dataset=evaluated
    )
    training.train()
    assert training.state.global_step == 1


@pytest.mark.slow
@pytest.mark.nightly
def test_what_fits_is_trained(small_model_directory: Path, rows: Callable[[str], Path], tmp_path: Path) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    training = built("dpo", small_model_directory, rows("dpo"), tmp_path, "4GiB", peft_config=lora)
    training.train()
    assert training.state.global_step == 1
