"""The same honest check for reward models: two sequences of a row, and a head of one output beside the layers."""

from __future__ import annotations

import pytest

from autotune.core.plan import TrainingPlan
from autotune.step.run.traced_training import TracedRows, traced_training
from autotune.virtual import trace
from autotune.virtual.phases import step_name
from autotune.virtual.reference import run_on_cpu
from tests.small import small_tokenizer
from tests.virtual.models import EVERY_ARCHITECTURE, config_of
from tests.virtual.test_against_cpu import ATTENTION_LORA, LENGTH, LORA


@pytest.mark.parametrize("checkpointing", ["off", "on", "every_2"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("architecture", EVERY_ARCHITECTURE)
def test_traced_peaks_are_those_of_the_cpu(architecture: str, lora: bool, checkpointing: str) -> None:
    words = {**(ATTENTION_LORA if "moe" in architecture else LORA), "lora_task_type": "SEQ_CLS"} if lora else {}
    args = {
        "per_device_train_batch_size": 2,
        "max_length": LENGTH,
        "bf16": False,
        "gradient_checkpointing": checkpointing != "off",
        **({"gradient_checkpointing_kwargs": {"every_n_layers": 2}} if checkpointing == "every_2" else {}),
    }
    plan = TrainingPlan("reward", args=args, model=words)
    # One pair is a token too long, and so dropped.
    rows = TracedRows([(LENGTH, 30), (32, 31), (LENGTH + 1, 2)])
    steps = traced_training(plan, config_of(architecture, num_hidden_layers=2), small_tokenizer(), rows)

    traced, real = trace(steps, target="cpu"), run_on_cpu(steps)

    for number in (0, 1):
        found, expected = traced.phase(step_name(number)).device_peak.bytes, real[step_name(number)].peak_bytes
        assert abs(found / expected - 1) <= 0.01, f"step {number}: peak {found} for {expected}"
