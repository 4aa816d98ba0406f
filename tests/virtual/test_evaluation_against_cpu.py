"""The same honest check for what comes after the steps: evaluation and saving."""

from __future__ import annotations

import pytest

from autotune.core.plan import TrainingPlan
from autotune.core.program import EVALUATE, SAVE
from autotune.step.run.traced_training import TracedRows, traced_training
from autotune.trainers.prompts import GENERATION, NO_REWARD
from autotune.virtual import trace
from autotune.virtual.phases import inside
from autotune.virtual.reference import run_on_cpu
from tests.small import small_tokenizer
from tests.virtual.models import EVERY_ARCHITECTURE, config_of
from tests.virtual.test_against_cpu import ATTENTION_LORA, LENGTH, LORA, small_vocabulary_tiles

__all__ = ["small_vocabulary_tiles"]

ROWS: dict[str, list[tuple[int, ...]]] = {
    "sft": [(LENGTH,), (LENGTH - 1,)],
    # One pair is cut, and one is a token shorter, so that there is padding.
    "dpo": [(12, 40, 30), (16, 32, 31)],
}
# The worst: as many tokens of prompts and completions as in a micro-batch of training.
PROMPTS = [(LENGTH - 16, 16)] * 2


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("trainer", ROWS)
@pytest.mark.parametrize("architecture", EVERY_ARCHITECTURE)
def test_traced_peaks_are_those_of_the_cpu(architecture: str, trainer: str, adapters: bool) -> None:
    words = (ATTENTION_LORA if "moe" in architecture else LORA) if adapters else {}
    args = {"per_device_train_batch_size": 2, "max_length": LENGTH, "bf16": False, "eval_strategy": "epoch"}
    plan = TrainingPlan(trainer, args=args, model=words)
    steps = traced_training(
        plan, config_of(architecture, num_hidden_layers=2), small_tokenizer(), TracedRows(ROWS[trainer])
    )

    traced, real = trace(steps, target="cpu"), run_on_cpu(steps, phases=(EVALUATE, SAVE))

    for name in (EVALUATE, SAVE):
        found, expected = traced.phase(name).device_peak.bytes, real[name].peak_bytes
        assert abs(found / expected - 1) <= 0.01, f"{name}: peak {found} for {expected}"
        # Both come after an update, so gradients are freed, and weights and the optimizer's state are held.
        assert found >= traced.phase(name).start_bytes > 0


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_traced_peaks_with_generation_are_those_of_the_cpu(trainer: str, adapters: bool) -> None:
    words = LORA if adapters else {}
    args = {
        "per_device_train_batch_size": 2, "max_completion_length": 16, "num_generations": 2, "steps_per_generation": 2,
        "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 2, "bf16": False, "eval_strategy": "epoch",
    }  # fmt: skip
    plan = TrainingPlan(trainer, args=args, model=words, rewards=(NO_REWARD,))
    steps = traced_training(plan, config_of("llama", num_hidden_layers=2), small_tokenizer(), TracedRows(PROMPTS))

    traced, real = trace(steps, target="cpu"), run_on_cpu(steps, phases=(EVALUATE, SAVE))

    for name in (EVALUATE, SAVE):
        found, expected = traced.phase(name).device_peak.bytes, real[name].peak_bytes
        assert abs(found / expected - 1) <= 0.01, f"{name}: peak {found} for {expected}"
    # Completions are generated there too.
    assert inside(traced, traced.phase(EVALUATE), GENERATION)


def test_a_save_takes_the_fused_weights_of_experts_apart() -> None:
    """``save_pretrained`` writes gate and up projections of each expert, and copies them on the device for that."""
    plan = TrainingPlan("sft", {"per_device_train_batch_size": 2, "max_length": LENGTH, "bf16": False})
    config = config_of("qwen3_moe", num_hidden_layers=2)
    fused = 2 * config.num_experts * 2 * config.moe_intermediate_size * config.hidden_size
    steps = traced_training(plan, config, small_tokenizer(), TracedRows(ROWS["sft"]))
    saving = trace(steps, target="cpu").phase(SAVE)
    assert saving.device_peak.bytes - saving.start_bytes == 4 * fused
