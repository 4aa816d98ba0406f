"""Determines from a model's configuration the heads of its attention, and what these cache of each token."""

from __future__ import annotations

from typing import Any

from autotune.core.workload import KeyValueCache

# Words in ``layer_types`` of layers whose state does not grow with the tokens.
_FIXED_STATE = ("linear_attention", "mamba", "conv", "recurrent")


def key_value_cache(text: Any) -> KeyValueCache | None:
    """Return the key-value cache of a text model's configuration, or None if the configuration has no such figures.

    Layers with a sliding window count as if they attended to all tokens, and where kinds of layers differ in their
    heads, the widest counts, so that the cache is never larger than this says.
    """
    layers = _caching_layers(text)
    compressed = getattr(text, "kv_lora_rank", None)
    if compressed:
        # Multi-head latent attention (DeepSeek) caches one compressed vector and one rotated key for all heads.
        return KeyValueCache(layers, 1, compressed + text.qk_rope_head_dim)
    queries, hidden = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    heads = _most(text, "num_key_value_heads", "num_global_key_value_heads") or queries
    width = _most(text, "head_dim", "global_head_dim") or (hidden // queries if hidden and queries else None)
    return KeyValueCache(layers, heads, 2 * width) if heads and width else None


def grouped_heads(text: Any) -> bool:
    """Return whether heads of queries share those of keys and values in attention, by a text model's configuration.

    Latent attention caches one key for all heads, and then makes one for each.
    """
    queries = getattr(text, "num_attention_heads", None)
    shared = _most(text, "num_key_value_heads", "num_global_key_value_heads")
    return not getattr(text, "kv_lora_rank", None) and bool(queries and shared) and shared != queries


def _caching_layers(text: Any) -> int:
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if not isinstance(kinds, (list, tuple)):
        return int(text.num_hidden_layers)
    return sum(not any(word in str(kind) for word in _FIXED_STATE) for kind in kinds)


def _most(text: Any, *names: str) -> int | None:
    found = [value for name in names if isinstance(value := getattr(text, name, None), int)]
    return max(found, default=None)
