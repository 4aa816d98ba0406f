"""Determines from a model's configuration the heads of its attention, and what these cache of each token."""

from __future__ import annotations

from collections.abc import Sequence
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
    compressed = _most(text, "kv_lora_rank")
    if compressed:
        # Multi-head latent attention (DeepSeek) caches one compressed vector and one rotated key for all heads.
        return KeyValueCache(layers, 1, compressed + (_most(text, "qk_rope_head_dim") or 0))
    queries, hidden = _most(text, "num_attention_heads"), getattr(text, "hidden_size", None)
    heads = _most(text, "num_key_value_heads", "num_global_key_value_heads") or queries
    width = _most(text, "head_dim", "global_head_dim") or (hidden // queries if hidden and queries else None)
    return KeyValueCache(layers, heads, 2 * width) if heads and width else None


def grouped_heads(text: Any) -> bool:
    """Return whether heads of queries share those of keys and values in attention, by a text model's configuration.

    Latent attention caches one key for all heads, and then makes one for each.
    """
    queries = _most(text, "num_attention_heads")
    shared = _most(text, "num_key_value_heads", "num_global_key_value_heads")
    return not _most(text, "kv_lora_rank") and bool(queries and shared) and shared != queries


def attention_heads(text: Any) -> int | None:
    """Return the heads of queries in a layer, or None if layers differ or the configuration does not say."""
    found = {getattr(layer, "num_attention_heads", None) for layer in _layers(text)}
    return found.pop() if len(found) == 1 else None


def _caching_layers(text: Any) -> int:
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if not isinstance(kinds, (list, tuple)):
        return int(text.num_hidden_layers)
    return sum(not any(word in str(kind) for word in _FIXED_STATE) for kind in kinds)


def _most(text: Any, *names: str) -> int | None:
    found = [value for layer in _layers(text) for name in names if isinstance(value := getattr(layer, name, None), int)]
    return max(found, default=None)


def _layers(text: Any) -> Sequence[Any]:
    """Return the configuration of each layer where they differ (Gemma 4), for which the model's own raises an error."""
    return text.per_layer_config if getattr(text, "is_heterogeneous", False) else (text,)
