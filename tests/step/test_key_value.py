"""The size of a token in a model's cache, compared with the cache that transformers fills."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from autotune.core.workload import KeyValueCache
from autotune.step.data.profile import attention_heads, grouped_heads, key_value_cache
from tests.small import small_config

TOKENS = 6


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "gemma2", "gpt_oss", "opt", "gpt2"])
def test_the_cache_has_as_many_numbers_as_transformers_keeps(model_type: str) -> None:
    config = small_config(model_type)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        cache = model(torch.ones(1, TOKENS, dtype=torch.long), use_cache=True).past_key_values
    kept = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    found = key_value_cache(config.get_text_config())
    assert found is not None
    assert found.layers * found.heads * found.elements * TOKENS == kept


def test_latent_attention_caches_one_vector_for_all_heads() -> None:
    # DeepSeek-V3: 512 compressed and 64 rotated numbers in each of 61 layers.
    text = SimpleNamespace(num_hidden_layers=61, kv_lora_rank=512, qk_rope_head_dim=64, num_attention_heads=128)
    assert key_value_cache(text) == KeyValueCache(61, 1, 576)


def test_layers_of_linear_attention_cache_nothing() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 3
    text = SimpleNamespace(
        num_hidden_layers=12, layer_types=kinds, num_attention_heads=16, num_key_value_heads=2, head_dim=256,
        hidden_size=2048,
    )  # fmt: skip
    assert key_value_cache(text) == KeyValueCache(3, 2, 512)


def test_a_configuration_without_heads_says_nothing() -> None:
    assert key_value_cache(SimpleNamespace(num_hidden_layers=2)) is None


@pytest.mark.parametrize(
    ("model_type", "changes", "grouped"),
    [("llama", {}, True), ("llama", {"num_key_value_heads": 4}, False), ("opt", {}, False), ("gpt2", {}, False)],
)
def test_heads_are_grouped_where_keys_have_fewer_than_queries(
    model_type: str, changes: Mapping[str, int], grouped: bool
) -> None:
    config = small_config(model_type, **changes)
    assert grouped_heads(config.get_text_config()) is grouped
    heads: set[tuple[int, int]] = set()

    def noted(query: torch.Tensor, key: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        heads.add((query.size(1), key.size(1)))
        return attention(query, key, *args, **more)

    attention = functional.scaled_dot_product_attention
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with mock.patch.object(functional, "scaled_dot_product_attention", noted), torch.no_grad():
        model(torch.ones(1, TOKENS, dtype=torch.long))
    assert {keys < queries for queries, keys in heads} == {grouped}


def test_latent_attention_has_keys_for_each_head() -> None:
    assert not grouped_heads(SimpleNamespace(kv_lora_rank=512, num_attention_heads=128, num_key_value_heads=1))


def test_where_layers_differ_in_their_heads_the_widest_count() -> None:
    # Gemma 4: heads of 16 in a sliding window, of 32 in full attention.
    config = small_config("gemma4_text", num_hidden_layers=16)
    assert key_value_cache(config) == KeyValueCache(16, 2, 2 * 32)
    assert grouped_heads(config)
    assert attention_heads(config) == 4


def test_layers_that_differ_in_their_heads_of_queries_have_no_number_of_them() -> None:
    config = small_config("llama")
    config.per_layer_config = {1: {"num_attention_heads": 2}}
    assert attention_heads(config) is None
    assert attention_heads(small_config("llama")) == 4
