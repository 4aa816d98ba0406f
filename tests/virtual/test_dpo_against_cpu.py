"""The same honest check for DPO: its reference model, adapters that are switched off, and the pass beforehand."""

from __future__ import annotations

import pytest

from autotune.core.plan import TrainingPlan
from autotune.step.run.traced_training import TracedRows, traced_training
from autotune.trainers.dpo import PRECOMPUTE
from autotune.virtual import trace
from autotune.virtual.phases import step_name
from autotune.virtual.reference import run_on_cpu
from tests.small import small_tokenizer
from tests.virtual.models import EVERY_ARCHITECTURE, config_of
from tests.virtual.test_against_cpu import ATTENTION_LORA, LENGTH, LORA, small_vocabulary_tiles

__all__ = ["small_vocabulary_tiles"]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointed"])
@pytest.mark.parametrize("reference", ["copy", "adapters off", "precomputed"])
@pytest.mark.parametrize("architecture", EVERY_ARCHITECTURE)
def test_traced_peaks_are_those_of_the_cpu(architecture: str, reference: str, checkpointing: bool) -> None:
    words = (ATTENTION_LORA if "moe" in architecture else LORA) if reference == "adapters off" else {}
    args = {
        "per_device_train_batch_size": 2,
        "max_length": LENGTH,
        "bf16": False,
        "gradient_checkpointing": checkpointing,
        "precompute_ref_log_probs": reference == "precomputed",
    }
    plan = TrainingPlan("dpo", args=args, model=words)
    # One pair is cut, and one is a token shorter, so that there is padding.
    rows = TracedRows([(12, 40, 30), (16, 32, 31)])
    steps = traced_training(plan, config_of(architecture, num_hidden_layers=2), small_tokenizer(), rows)

    traced, real = trace(steps, target="cpu"), run_on_cpu(steps, phases=("optimizer step", PRECOMPUTE))

    for name in (step_name(0), step_name(1), *((PRECOMPUTE,) if reference == "precomputed" else ())):
        found, expected = traced.phase(name).device_peak.bytes, real[name].peak_bytes
        assert abs(found / expected - 1) <= 0.01, f"{name}: peak {found} for {expected}"
