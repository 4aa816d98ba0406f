"""A shrunken copy of a model: same class, same kinds of layer, but few and narrow, so that it runs in seconds."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import torch

_HEAD_DIM = 16
_VOCABULARY = 256
_WINDOW = 8

# Widths and counts that stand for themselves whatever the heads are: the smallest at which each still does its work.
_SMALL: Mapping[str, int] = {
    "vocab_size": _VOCABULARY,
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
    """Return a model of the same class on the CPU: narrow where the architecture can be narrowed, else of full width.

    Args:
        layers: how many layers at the least; there is one of each layer type that the configuration names.
        attention: the attention implementation, or None for the class's own choice.

    Raises:
        Exception: what the class raises when it cannot be built at all, such as ValueError for an attention
            implementation that it does not have.
    """
    choices = {"attn_implementation": attention} if attention is not None else {}
    try:
        model = architecture._from_config(_few_layers(_narrow(config), layers), dtype=dtype, **choices)
        _try(model)
    except Exception:  # noqa: BLE001 any error of a narrow copy is answered by a copy of full width, whose errors count
        model = architecture._from_config(_few_layers(config, layers), dtype=dtype, **choices)
    return model


def _try(model: Any) -> None:
    """Run one short document through a narrow copy; widths that do not go together show here."""
    if model.device.type == "cpu" and model.config._attn_implementation in ("eager", "sdpa"):
        with torch.no_grad():
            model(torch.arange(3)[None], use_cache=False)


def _narrow(config: Any) -> Any:
    config = copy.deepcopy(config)
    text = config.get_text_config()
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
        # A lone number is replaced; None says that the model has none, and a list has its own meaning.
        if isinstance(present, int) and not isinstance(present, bool) and present > value:
            with contextlib.suppress(AttributeError):  # follows from others of these
                setattr(text, name, value)
    for name in _SPECIAL_TOKENS:
        if getattr(text, name, None) is not None:
            setattr(text, name, 0)
    return config


def _few_layers(config: Any, layers: int) -> Any:
    config = copy.deepcopy(config)
    text = config.get_text_config()
    count = text.num_hidden_layers
    types = getattr(text, "layer_types", None)
    kept = sorted({types.index(kind) for kind in types}) if types else []
    kept = sorted({*kept, *[index for index in range(count) if index not in kept][: max(0, layers - len(kept))]})
    for name, value in list(vars(text).items()):
        # What is said of each layer is a list as long as the model is deep.
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, [value[index] for index in kept])
    text.num_hidden_layers = len(kept)
    return config
