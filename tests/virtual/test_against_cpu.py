"""The standing honest check: what a trace for the CPU says is what PyTorch's CPU allocator really hands out."""

from __future__ import annotations

import pytest

from autotune.core.plan import TrainingPlan
from autotune.step.run.traced_training import TracedRows, traced_training
from autotune.virtual import trace
from autotune.virtual.phases import step_name
from autotune.virtual.reference import run_on_cpu
from tests.small import small_tokenizer
from tests.virtual.models import ARCHITECTURES, config_of

LENGTH = 48
LORA = {"use_peft": True, "lora_r": 8, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
ATTENTION_LORA = {**LORA, "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


@pytest.fixture(autouse=True)
def small_vocabulary_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    # TRL's tile of 32768 words would be most of a small model's peak and hide every error in the rest.
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 128)


@pytest.mark.parametrize(
    ("architecture", "lora", "checkpointing"),
    [
        # Of other architectures than Llama, one case in every run of the tests, and the others in the nightly one.
        pytest.param(
            name, lora, checkpointing, marks=[] if name == "llama" or lora > checkpointing else pytest.mark.nightly,
            id="-".join([name, "lora" if lora else "full", "checkpointed" if checkpointing else "stored"]),
        )
        for name in ARCHITECTURES for lora in (False, True) for checkpointing in (False, True)
    ],
)  # fmt: skip
def test_traced_peaks_are_those_of_the_cpu(architecture: str, lora: bool, checkpointing: bool) -> None:
    # Half of the cases are packed: full fine-tuning with checkpointing, LoRA without.
    packing = lora != checkpointing
    words = (ATTENTION_LORA if "moe" in architecture else LORA) if lora else {}
    args = {
        "per_device_train_batch_size": 2,
        "max_length": LENGTH,
        "bf16": False,
        "packing": packing,
        "gradient_checkpointing": checkpointing,
    }
    plan = TrainingPlan("sft", args=args, model=words)
    rows = TracedRows([(36,), (24,), (12,), (LENGTH,)])
    steps = traced_training(plan, config_of(architecture, num_hidden_layers=2), small_tokenizer(), rows)

    traced, real = trace(steps, target="cpu"), run_on_cpu(steps)

    for number in (0, 1):
        expected, phase = real[step_name(number)], traced.phase(step_name(number))
        error = phase.device_peak.bytes / expected.peak_bytes - 1
        assert abs(error) <= 0.01, f"peak {phase.device_peak.bytes} for {expected.peak_bytes}"
        asked = sum(event.change_bytes for event in traced.events[phase.first_event : phase.end_event]
                    if event.change_bytes > 0)  # fmt: skip
        really_asked = sum(change for change, _, _ in expected.events if change > 0)
        assert abs(asked / really_asked - 1) <= 0.03
