"""``autotune.plan`` of candidates with vLLM on the GPU of the training."""

from __future__ import annotations

import pytest

import autotune
from autotune.core.candidate import Choice
from autotune.core.estimate import Origin

ONE_WAY: dict[str, Choice] = {
    "attention": "sdpa", "gradient_checkpointing": "off", "liger": "off", "optimizer": "adamw_torch",
    "pad_to_multiple_of": "none", "precision": "float32", "per_device_train_batch_size": 8,
    "steps_per_generation": "step", "max_completion_length": 16, "beta": "0.0", "num_iterations": 1,
    "num_generations": 8, "hub_kernels": "off", "allocator": "default",
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.slow
def test_candidates_with_vllm_have_memory_and_no_time(model: str) -> None:
    fix = {**ONE_WAY, "vllm": "colocate-sleep", "vllm_gpu_memory_utilization": "0.5"}
    found = autotune.plan(model, seq_len=32, trainer="grpo", gpu="RTX4090", fix=fix)
    [estimate] = found.estimates
    assert estimate.origin is Origin.TRACED
    assert estimate.memory is not None
    assert estimate.tokens_per_second is None
    assert estimate.memory.breakdown["vLLM"] == -(-found.gpu.memory_bytes // 2)
    assert sum(estimate.memory.breakdown.values()) == estimate.memory.device_bytes
    assert any("How fast vLLM generates cannot be traced" in note for note in found.notes)
    assert any("asleep, it still holds 1.00 GiB" in note for note in found.notes)


@pytest.mark.slow
def test_a_share_that_vllm_does_not_start_with_is_told_with_the_reason(model: str) -> None:
    fix = {**ONE_WAY, "vllm": "colocate", "vllm_gpu_memory_utilization": "0.05"}
    found = autotune.plan(model, seq_len=32, trainer="grpo", gpu="24GiB", fix=fix)
    assert found.fastest is None
    assert "vLLM does not start with 0.05 of the GPU" in found.estimates[0].reason
