"""Builds a shrunken model: the same class and kinds of layer, but few and narrow layers, so that it runs in seconds."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import torch

from autotune.step.models.layers import few_layers

_HEAD_DIM = 16
_VOCABULARY = 256
_WINDOW = 8

# Widths and counts that do not depend on the heads: the smallest values at which each mechanism still takes effect.
_SMALL: Mapping[str, int] = {
    "vocab_size": _VOCABULARY,
    "vocab_size_per_layer_input": _VOCABULARY,
    "sliding_window": _WINDOW,
    "attention_chunk_size": _WINDOW,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": _HEAD_DIM,
    "qk_rope_head_dim": _HEAD_DIM,
    "v_head_dim": _HEAD_DIM,
}
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def shrunken_model(
    architecture: type[Any], config: Any, *, layers: int, attention: str | None = None, dtype: str = "float32"
) -> Any:
    """Return a model of the same class on the CPU: narrow if the architecture can be narrowed, else of full width.

    Args:
        layers: the minimum number of layers; every layer type that the configuration names occurs at least once.
        attention: the attention implementation, or None for the class's own choice.

    Raises:
        Exception: any error of the class when it cannot be built at all, such as ValueError for an attention
            implementation that it does not support.
    """
    choices = {"attn_implementation": attention} if attention is not None else {}
    try:
        model = architecture._from_config(few_layers(narrow(config), layers), dtype=dtype, **choices)
        _try(model)
    except Exception:  # noqa: BLE001 any error of a narrow copy leads to one of full width, whose errors count
        model = architecture._from_config(few_layers(config, layers), dtype=dtype, **choices)
    return model


def _try(model: Any) -> None:
    """Run one short document through a narrow copy; incompatible widths raise an error here."""
    if model.device.type == "cpu" and model.config._attn_implementation in ("eager", "sdpa"):
        with torch.no_grad():
            model(torch.arange(3)[None], use_cache=False)


def narrow(config: Any) -> Any:
    """Return a copy of a configuration with small widths and counts; its layers stay as many as they are."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):
        text.per_layer_config = None  # widths of some of the layers alone, such as Gemma 4's heads of full attention
    heads = getattr(text, "num_attention_heads", None) or 1
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    new_key_value_heads = min(key_value_heads, 2)
    new_heads = new_key_value_heads * min(heads // key_value_heads, 4)
    hidden = new_heads * _HEAD_DIM
    widths = {
        **_SMALL,
        "num_attention_heads": new_heads,
        "num_key_value_heads": new_key_value_heads,
        "head_dim": _HEAD_DIM,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "ffn_dim": 2 * hidden,
        "word_embed_proj_dim": hidden,
    }
    for name, value in widths.items():
        present = getattr(text, name, None)
        # Only single numbers are replaced: None means that the model lacks the part, and lists have their own meaning.
        if isinstance(present, int) and not isinstance(present, bool) and present > value:
            with contextlib.suppress(AttributeError):  # read-only: derived from other fields
                setattr(text, name, value)
    for name in _SPECIAL_TOKENS:
        if getattr(text, name, None) is not None:
            setattr(text, name, 0)
    return config
