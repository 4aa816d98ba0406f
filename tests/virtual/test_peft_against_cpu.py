"""A trace of a method of PEFT that TRL's command line has no keys for is what PyTorch's CPU allocator hands out."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.core.plan import TrainingPlan
from autotune.step.run.traced_training import traced_training
from autotune.step.run.virtual_trainer import TracedRows
from autotune.virtual import trace
from autotune.virtual.phases import step_name
from tests.small import small_config, small_tokenizer
from tests.virtual.reference import run_on_cpu

pytestmark = pytest.mark.usefixtures("small_vocabulary_tiles")
METHODS: list[Any] = [
    {"peft_type": "IA3", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    pytest.param({"peft_type": "LOHA", "target_modules": ["q_proj", "o_proj"], "r": 4}, marks=pytest.mark.nightly),
    pytest.param({"peft_type": "VERA", "target_modules": ["q_proj", "o_proj"], "r": 8}, marks=pytest.mark.nightly),
    {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 4},
    {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method["peft_type"])
def test_traced_peaks_of_a_method_are_those_of_the_cpu(method: dict[str, Any]) -> None:
    args = {"per_device_train_batch_size": 2, "max_length": 48, "bf16": False, "gradient_checkpointing": False}
    plan = TrainingPlan("sft", args=args, model={"use_peft": True}, peft=method)
    steps = traced_training(
        plan, small_config(tie_word_embeddings=False), small_tokenizer(), TracedRows([(48,), (40,)])
    )

    traced, real = trace(steps, target="cpu"), run_on_cpu(steps)

    found, expected = traced.phase(step_name(1)).device_peak.bytes, real[step_name(1)].peak_bytes
    assert found == pytest.approx(expected, rel=0.01)
