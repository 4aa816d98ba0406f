"""The same honest check for online DPO: generation with and without a cache, the reference, and full logits."""

from __future__ import annotations

import pytest

from autotune.core.plan import Completions, TrainingPlan
from autotune.step.run.traced_training import TracedRows, traced_training
from autotune.trainers.prompts import GENERATION, NO_REWARD, REFERENCE_PASS
from autotune.virtual import trace
from autotune.virtual.phases import step_name
from autotune.virtual.reference import run_on_cpu
from tests.small import small_tokenizer
from tests.virtual.models import EVERY_ARCHITECTURE, config_of
from tests.virtual.test_against_cpu import ATTENTION_LORA, LORA, small_vocabulary_tiles

__all__ = ["small_vocabulary_tiles"]

PROMPT, COMPLETION = 48, 8
ERROR = 0.01


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored, with a cache", "checkpointed, without"])
@pytest.mark.parametrize("reference", ["copy", "adapters off"])
@pytest.mark.parametrize("architecture", EVERY_ARCHITECTURE)
def test_traced_peaks_are_those_of_the_cpu(architecture: str, reference: str, checkpointing: bool) -> None:
    assert_same_peaks(architecture, reference, checkpointing=checkpointing, max_length=PROMPT + COMPLETION)


def test_completions_that_leave_no_room_for_prompts_are_traced_as_they_train() -> None:
    assert_same_peaks("llama", "copy", checkpointing=True, max_length=COMPLETION // 2)


def assert_same_peaks(architecture: str, reference: str, *, checkpointing: bool, max_length: int) -> None:
    words = (ATTENTION_LORA if "moe" in architecture else LORA) if reference == "adapters off" else {}
    args = {
        "per_device_train_batch_size": 2,
        "max_new_tokens": COMPLETION,
        "max_length": max_length,
        "bf16": False,
        "gradient_checkpointing": checkpointing,
    }
    plan = TrainingPlan(
        "online_dpo", args=args, model=words, rewards=(NO_REWARD,), completions=Completions(COMPLETION, COMPLETION)
    )
    rows = TracedRows([(PROMPT, COMPLETION)] * 2)
    steps = traced_training(plan, config_of(architecture, num_hidden_layers=2), small_tokenizer(), rows)

    traced, real = trace(steps, target="cpu"), run_on_cpu(steps, phases=("optimizer step", GENERATION, REFERENCE_PASS))

    for name in (step_name(0), step_name(1), GENERATION, REFERENCE_PASS):
        # Of phases with the same name, the record of the real run has the first.
        first = next(phase for phase in traced.phases if phase.name == name)
        found, expected = first.device_peak.bytes, real[name].peak_bytes
        assert abs(found / expected - 1) <= ERROR, f"{name}: peak {found} for {expected}"
