"""Shapes of the compared models: small ones of each family, and those of published models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.shapes import CONFIGURATIONS, LLAMA_8B

_TOKENS: Mapping[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
_VOCABULARY = 32000
_POSITIONS = 16384
_SMALL: Mapping[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": _POSITIONS,
    "tie_word_embeddings": True,
    **_TOKENS,
}
_HEADS = {"head_dim": 64}
_WINDOW = {"sliding_window": 512}


def _of(model_type: str, architecture: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **_SMALL, **changes}


FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": _of("llama", "LlamaForCausalLM"),
    "qwen2": _of("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _of("qwen3", "Qwen3ForCausalLM", **_HEADS),
    "mistral": _of("mistral", "MistralForCausalLM", **_WINDOW),
    "gemma2": _of("gemma2", "Gemma2ForCausalLM", **_HEADS, **_WINDOW),
    "gemma3": _of("gemma3_text", "Gemma3ForCausalLM", **_HEADS, **_WINDOW, sliding_window_pattern=2),
    "phi3": _of("phi3", "Phi3ForCausalLM"),
    "olmo2": _of("olmo2", "Olmo2ForCausalLM"),
    "gpt_neox": _of("gpt_neox", "GPTNeoXForCausalLM"),
    "opt": _of("opt", "OPTForCausalLM", ffn_dim=2048, word_embed_proj_dim=512),
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 512, "n_layer": 2, "n_head": 8,
        "n_positions": _POSITIONS, "vocab_size": _VOCABULARY, **_TOKENS,
    },
    "mixtral": _of("mixtral", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _of(
        "qwen3_moe", "Qwen3MoeForCausalLM", **_HEADS, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=512
    ),
}  # fmt: skip
"""Two layers, 512 wide, of each family."""

_QWEN = {name: shape for name, shape in CONFIGURATIONS.items() if name.startswith("qwen2.5")}
MODELS: Mapping[str, Mapping[str, Any]] = {**FAMILIES, **_QWEN, "llama-8b": LLAMA_8B}
"""By name, all shapes."""

PICTURED: Mapping[str, str] = {"gemma3 with images": "gemma3", "llava_next with images": "llava_next"}
"""Families of vision-language models (:mod:`tests.vision`), by the names of models: small ones, on rows with images.

The page (:mod:`benchmarks.nullgpu.page`) has the reasons why others are not among them.
"""
PICTURED_ROWS = 8
