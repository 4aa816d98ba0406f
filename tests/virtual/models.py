"""Small models of the architectures whose traces are compared with the CPU."""

from __future__ import annotations

from typing import Any

from tests.small import small_config

_DENSE = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 128}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _DENSE,
    "qwen2": _DENSE,
    "gemma": {**_DENSE, "head_dim": 16},
    "mistral": {**_DENSE, "sliding_window": 24},
    "gpt_neox": {"num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128},
    "qwen3_moe": {**_DENSE, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


FURTHER: dict[str, dict[str, Any]] = {
    # Takes FlashAttention's function over only where it is installed.
    "falcon": {"num_attention_heads": 4, "hidden_size": 64, "ffn_hidden_size": 128},
    "qwen3": {**_DENSE, "head_dim": 16},
    # Every second layer attends to a window only.
    "gemma3_text": {**_DENSE, "head_dim": 16, "sliding_window": 24, "sliding_window_pattern": 2},
    "opt": {"num_attention_heads": 4, "hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "mixtral": {**_DENSE, "num_local_experts": 4, "num_experts_per_tok": 2},
}
FAMILIES = ("llama", "qwen3", "gemma3_text", "mistral", "opt", "mixtral", "gpt_neox")
"""One architecture of each family that every trainer's phases are compared on."""


def config_of(architecture: str, **changes: Any) -> Any:
    """Return the configuration of a small model: by default 3 layers; ``changes`` override it."""
    shape = {**ARCHITECTURES, **FURTHER}[architecture]
    return small_config(architecture, **{"num_hidden_layers": 3, "max_position_embeddings": 4096, **shape, **changes})
