"""vLLM's memory rule, compared with vLLM's logs on real GPUs, and its effect on a training on the same GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.app.servers import generating_gpus, server_error, server_of
from autotune.core.documents.estimate import MemoryEstimate
from autotune.core.plan import TrainingPlan
from autotune.core.setting import Setting
from autotune.core.workload import KeyValueCache, ModelProfile
from autotune.planning.vllm import SLEEPING_BYTES, TYPE_BYTES, Engine, engine_of
from autotune.units import GIB
from tests.settings import setting, workload

ROUNDED = 0.011 * GIB
"""Logs have two digits after the point, and sums of several of them are off by as much."""
QWEN2_5_1_5B = KeyValueCache(layers=28, heads=2, elements=2 * 128)
QWEN3_8B = KeyValueCache(layers=36, heads=8, elements=2 * 128)


def on(item: Engine, of: ModelProfile, total_bytes: int) -> Engine:
    return replace(item, model=of, total_bytes=total_bytes)


def start_error(item: Engine, of: ModelProfile, total_bytes: int) -> str:
    return on(item, of, total_bytes).start_error


def together(training: MemoryEstimate, item: Engine, of: ModelProfile, total_bytes: int) -> MemoryEstimate:
    return on(item, of, total_bytes).with_training(training)


def block_bytes(of: ModelProfile, parallel: int = 1) -> int | None:
    return engine(model=of, parallel=parallel).block_bytes


def model(cache: KeyValueCache | None, parameters: int = 8_000_000_000) -> ModelProfile:
    return replace(workload().model, cache=cache, parameters=parameters, max_positions=131_072)


# "the current vLLM instance can use total_gpu_memory (T) x gpu_memory_utilization (U) = R": the first is of vLLM issue
# 17117, the second of a run of GRPO on a T4 with vLLM 0.7.2, the third of an A100 with vLLM 0.6; the fourth is in the
# words of vLLM 0.1x, "Initial free memory 78.66; Requested memory: 0.825 (util), 65.32" (llm-d-fast-model-actuation
# issue 746, an H100 with 79.18 GiB).
@pytest.mark.parametrize(
    ("total", "utilization", "requested"),
    [(79.14, 0.25, 19.78), (14.56, 0.50, 7.28), (79.25, 0.15, 11.89), (79.18, 0.825, 65.32)],
)
def test_vllm_requests_a_share_of_all_memory(total: float, utilization: float, requested: float) -> None:
    found = on(engine(utilization=utilization), model(QWEN3_8B), round(total * GIB))
    assert found.requested_bytes == pytest.approx(requested * GIB, abs=ROUNDED)


def test_a_request_is_rounded_up_to_bytes() -> None:
    assert on(engine(utilization=0.3), model(QWEN3_8B), 1001).requested_bytes == 301


# "model weights take W; non_torch_memory takes N; PyTorch activation peak memory takes A; the rest of the memory
# reserved for KV Cache is C", of the same logs; of the fourth, "Total non KV cache memory: 1.05GiB; weights memory:
# 0.67GiB". The fifth is the example in vLLM's own docstring of memory_profiling: 2 GiB weights, 2 activations, 1 other.
@pytest.mark.parametrize(
    ("requested", "weights", "beside", "cache"),
    [
        (19.78, 8.64, 0.15 + 0.25, 10.74),
        (7.28, 2.89, 0.01 + 2.02, 2.36),
        (11.89, 8.51, 0.26 + 0.94, 2.18),
        (65.32, 0.67, 1.05 - 0.67, 64.27),
        (10.0, 2.0, 2.0 + 1.0, 5.0),
    ],
)
def test_the_cache_is_what_is_left_of_it(requested: float, weights: float, beside: float, cache: float) -> None:
    held = engine(utilization=1.0, overhead_bytes=round(beside * GIB))
    weighing = model(QWEN3_8B, round(weights * GIB) // TYPE_BYTES)
    assert on(held, weighing, round(requested * GIB)).cache_bytes == pytest.approx(cache * GIB, abs=ROUNDED)


# The T4's log: "KV Cache is 2.36GiB", "# CUDA blocks: 5517", "Maximum concurrency for 32768 tokens per request: 2.69x".
# LMCache issue 3430, vLLM 0.21: "Available KV cache memory: 6.37 GiB", "GPU KV cache size: 46,368 tokens", "Maximum
# concurrency for 16,384 tokens per request: 2.83x".
@pytest.mark.parametrize(
    ("cache", "gib", "blocks", "tokens", "sequences"),
    [(QWEN2_5_1_5B, 2.36, 5517, 32_768, 2.69), (QWEN3_8B, 6.37, 46_368 // 16, 16_384, 2.83)],
)
def test_blocks_and_sequences_are_those_that_vllm_logged(
    cache: KeyValueCache, gib: float, blocks: int, tokens: int, sequences: float
) -> None:
    block = block_bytes(model(cache))
    assert block is not None
    assert gib * GIB / block == pytest.approx(blocks, abs=0.005 * GIB / block + 1)
    alone = engine(utilization=1.0, overhead_bytes=0, tokens=tokens)
    assert on(alone, model(cache, 0), blocks * block).sequences == pytest.approx(sequences, abs=0.01)


def test_weights_and_heads_are_divided_among_gpus() -> None:
    whole = engine(parallel=1)
    halves = engine(parallel=2)
    alone, shared = (on(item, model(QWEN3_8B), 80 * GIB) for item in (whole, halves))
    assert shared.cache_bytes - alone.cache_bytes == 8_000_000_000 * TYPE_BYTES // 2
    assert block_bytes(model(QWEN3_8B), 2) == block_bytes(model(QWEN3_8B), 1) // 2  # type: ignore[operator]
    # A single head is copied.
    latent = KeyValueCache(layers=61, heads=1, elements=576)
    assert block_bytes(model(latent), 2) == block_bytes(model(latent), 1)


def engine(**changes: object) -> Engine:
    known = Engine(False, False, 0.5, 1, 1536, model(None), 80 * GIB)
    return replace(known, **changes)  # type: ignore[arg-type]


TRAINING = MemoryEstimate(
    peak_bytes=38 * GIB,
    reserved_bytes=39 * GIB,
    context_bytes=GIB,
    breakdown={"parameter": 20 * GIB, "activation": 18 * GIB, "fragmentation": GIB, "context": GIB},
    host_bytes=0,
    step_seconds=3.0,
    error=0.1,
    generation_bytes=25 * GIB,
)


def test_awake_all_the_time_its_request_comes_on_top_of_training_s_peak() -> None:
    found = together(TRAINING, engine(utilization=0.25), model(QWEN3_8B), 80 * GIB)
    assert found.device_bytes == (40 + 20) * GIB == sum(found.breakdown.values())
    assert found.breakdown["vLLM"] == 20 * GIB


def test_asleep_it_leaves_a_rest_while_the_model_is_trained() -> None:
    found = together(TRAINING, engine(utilization=0.1, sleeps=True), model(QWEN3_8B), 80 * GIB)
    assert found.device_bytes == 40 * GIB + SLEEPING_BYTES == sum(found.breakdown.values())


def test_awake_it_has_the_gpu_with_what_training_keeps() -> None:
    found = together(TRAINING, engine(utilization=0.5, sleeps=True), model(QWEN3_8B), 80 * GIB)
    assert found.device_bytes == (25 + 40) * GIB == sum(found.breakdown.values())
    assert found.breakdown == {"training at rest": 24 * GIB, "vLLM": 40 * GIB, "context": GIB}


def test_while_it_gets_the_weights_it_has_woken_them_and_not_its_cache() -> None:
    asked = engine(utilization=0.5, sleeps=True)
    gathering = replace(TRAINING, generation_bytes=5 * GIB, synchronisation_bytes=35 * GIB)
    found = together(gathering, asked, model(QWEN3_8B), 80 * GIB)
    woken_bytes = 8_000_000_000 * TYPE_BYTES + SLEEPING_BYTES
    assert found.device_bytes == 35 * GIB + woken_bytes == sum(found.breakdown.values())
    assert found.breakdown == {"training at rest": 34 * GIB, "vLLM": woken_bytes, "context": GIB}


def test_a_server_takes_the_buffers_of_the_weights_only_while_they_are_sent() -> None:
    assert together(TRAINING, engine(on_server=True), model(QWEN3_8B), 80 * GIB).device_bytes == 40 * GIB
    full = replace(TRAINING, generation_bytes=39 * GIB)
    found = together(full, engine(on_server=True), model(QWEN3_8B), 80 * GIB)
    assert found.device_bytes == 39 * GIB + 2 * GIB


def test_the_weight_that_exceeds_a_buffer_s_size_is_in_it_in_the_type_that_is_trained() -> None:
    full = replace(TRAINING, generation_bytes=39 * GIB)
    vocabulary = replace(model(QWEN3_8B), largest_weight=GIB // 2)
    for trained_bytes, buffers in ((4, 6 * GIB), (2, 4 * GIB)):
        sent = engine(on_server=True, trained_bytes=trained_bytes)
        assert together(full, sent, vocabulary, 80 * GIB).device_bytes == 39 * GIB + buffers
    small = replace(vocabulary, parameters=GIB)
    assert together(full, engine(on_server=True), small, 80 * GIB).device_bytes == 39 * GIB + 4 * GIB


def test_no_time_is_said_of_a_step_that_vllm_generates_for() -> None:
    assert together(TRAINING, engine(), model(QWEN3_8B), 80 * GIB).step_seconds is None


def test_vllm_does_not_start_without_room_for_one_sequence() -> None:
    # 16 GB of weights and 2 GiB beside: 16.9 GiB of 80 are a share of 0.212.
    assert "less than its weights" in start_error(engine(utilization=0.2), model(QWEN3_8B), 80 * GIB)
    assert start_error(engine(utilization=0.22), model(QWEN3_8B), 80 * GIB) == ""
    long = engine(utilization=0.22, tokens=131_072)
    assert "does not hold one sequence of 131,072 tokens" in start_error(long, model(QWEN3_8B), 80 * GIB)
    assert start_error(engine(on_server=True, utilization=0.01), model(QWEN3_8B), 80 * GIB) == ""


# Qwen2.5-7B: 28 layers of linear modules with 233 million weights each, of 7.6 billion weights in all.
def test_weights_that_training_holds_in_4_bits_are_quantised_by_vllm_too() -> None:
    whole = replace(model(QWEN2_5_1_5B, 7_615_616_512), quantizable=28 * 233_046_016)
    card = round(23.5 * GIB)
    assert "less than its weights" in start_error(engine(), whole, card)
    assert start_error(engine(in_4_bits=True), whole, card) == ""
    saved = on(engine(in_4_bits=True), whole, card).cache_bytes - on(engine(), whole, card).cache_bytes
    assert (7_615_616_512 * TYPE_BYTES - saved) / GIB == pytest.approx(5.45, abs=0.01)


def test_a_model_whose_cache_is_not_known_is_not_refused_for_it() -> None:
    assert on(engine(), model(None), 80 * GIB).sequences is None
    assert start_error(engine(), model(None), 80 * GIB) == ""


def of_model(profile: ModelProfile) -> Setting:
    return setting(of=replace(workload(), model=profile))


def test_the_engine_is_the_one_that_trl_starts() -> None:
    known = model(None)
    here = of_model(known)
    total = here.machine.hardware.memory_bytes
    args = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "use_vllm": True, "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.4, "vllm_tensor_parallel_size": 2, "vllm_max_model_length": 3072,
        "vllm_enable_sleep_mode": True,
    }  # fmt: skip
    assert engine_of(TrainingPlan("grpo", args), here) == Engine(False, True, 0.4, 2, 3072, known, total)
    untold = {name: args[name] for name in list(args)[:3]}
    assert engine_of(TrainingPlan("grpo", untold), here) == Engine(False, False, 0.3, 1, 131_072, known, total)
    alone = engine_of(TrainingPlan("online_dpo", {**untold, "max_length": 512, "max_new_tokens": 64}), here)
    assert alone is not None
    assert alone.utilization == 0.55
    # A server loads the model by itself.
    for mode, in_4_bits in (("colocate", True), ("server", False)):
        plan = TrainingPlan("grpo", {**args, "vllm_mode": mode}, {"load_in_4bit": True})
        found = engine_of(plan, here)
        assert found is not None
        assert found.in_4_bits is in_4_bits
    assert engine_of(TrainingPlan("grpo", {**args, "use_vllm": False}), here) is None


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


def server(gpus: int, total_bytes: int, tokens: int = 4096) -> Engine:
    return on(server_of(PLAN, of_model(LLAMA), gpus, tokens), LLAMA, total_bytes)


def test_several_gpus_share_weights_and_cache() -> None:
    one, four = server(1, 80 * GIB), server(4, 80 * GIB)
    assert server_error(one) == server_error(four) == ""
    assert one.requested_bytes == four.requested_bytes == 72 * GIB
    assert four.cache_bytes - one.cache_bytes == pytest.approx(2 * LLAMA.parameters * 3 / 4, abs=2)
    # A token takes 128 KiB of keys and values in all, a quarter of that on each of four GPUs.
    assert one.sequences == pytest.approx(one.cache_bytes / (4096 * 128 * 1024), rel=0.01)
    assert four.sequences == pytest.approx(four.cache_bytes / (4096 * 32 * 1024), rel=0.01)


def test_a_server_that_does_not_start_says_why() -> None:
    assert "is less than its weights" in server_error(server(1, 16 * GIB))
    assert server_error(server(2, 16 * GIB)) == ""
    assert server_error(server(3, 80 * GIB)) == "vLLM cannot divide 32 attention heads among 3 GPUs"


@pytest.mark.parametrize(("gpus", "numbers"), [(1, []), (2, [1]), (8, [1, 2, 4])])
def test_the_server_gets_a_power_of_two_and_leaves_some(gpus: int, numbers: list[int]) -> None:
    assert list(generating_gpus(gpus)) == numbers
