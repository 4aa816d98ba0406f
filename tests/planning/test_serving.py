"""What a vLLM server holds on GPUs of its own, by vLLM's own rule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.app.servers import generating_gpus, held_by_server, server_of
from autotune.core.plan import TrainingPlan
from autotune.core.workload import KeyValueCache
from autotune.planning.vllm import Reservation
from autotune.units import GIB
from tests.settings import setting

# Llama-3.1-8B (its config.json): 32 layers, 32 heads of 128 numbers, 8 of keys and values.
LLAMA = replace(
    setting().workload.model,
    parameters=8_030_261_248,
    cache=KeyValueCache(layers=32, heads=8, elements=256),
    attention_heads=32,
    max_positions=131_072,
)
PLAN = TrainingPlan("grpo", {"use_vllm": True, "vllm_mode": "server", "per_device_train_batch_size": 8,
                             "gradient_accumulation_steps": 1})  # fmt: skip


def held(gpus: int, total_bytes: int, tokens: int = 4096) -> Reservation | str:
    return held_by_server(server_of(PLAN, LLAMA, gpus, tokens), LLAMA, total_bytes)


def test_several_gpus_share_weights_and_cache() -> None:
    one, four = held(1, 80 * GIB), held(4, 80 * GIB)
    assert isinstance(one, Reservation)
    assert isinstance(four, Reservation)
    assert one.requested_bytes == four.requested_bytes == 72 * GIB
    assert four.cache_bytes - one.cache_bytes == pytest.approx(2 * LLAMA.parameters * 3 / 4, abs=2)
    assert one.sequences is not None
    assert four.sequences is not None
    # A token takes 128 KiB of keys and values in all, a quarter of that on each of four GPUs.
    assert one.sequences == pytest.approx(one.cache_bytes / (4096 * 128 * 1024), rel=0.01)
    assert four.sequences == pytest.approx(four.cache_bytes / (4096 * 32 * 1024), rel=0.01)


def test_a_server_that_does_not_start_says_why() -> None:
    assert "is less than its weights" in str(held(1, 16 * GIB))
    assert isinstance(held(2, 16 * GIB), Reservation)
    assert held(3, 80 * GIB) == "vLLM cannot share 32 attention heads out among 3 GPUs"


@pytest.mark.parametrize(("gpus", "numbers"), [(1, []), (2, [1]), (8, [1, 2, 4])])
def test_the_server_gets_a_power_of_two_and_leaves_some(gpus: int, numbers: list[int]) -> None:
    assert list(generating_gpus(gpus)) == numbers
