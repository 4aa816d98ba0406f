"""Makes smaller configurations and models: the first layers at full width, or a few narrow layers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

# Fields with a layer count or index at which the kind of layer changes.
_LAYER_THRESHOLDS = ("max_window_layers", "first_k_dense_replace")
_LAYER_INDEX_FIELDS: Mapping[str, int] = {
    "hybrid_layer_ids": 0,
    "mlp_only_layers": 0,
    "moe_layers": 0,
    "cross_attention_layers": 0,
    "rope_scaling_layers": 0,
    "ple_layer_ids": 1,
}
"""Fields that list some of the layers by their indices, and the index of the first layer."""
MIN_BUILT_LAYERS = 2
"""Layers of a copy that is built but not traced: RWKV's classes divide by the number of layers minus one."""
# Field with the number of last layers that attend to keys and values of earlier layers (Gemma 3n and 4).
_SHARED_KV_LAYERS = "num_kv_shared_layers"

_HEAD_DIM = 16
_VOCABULARY = 256
_WINDOW = 8

# Widths and counts that do not depend on the heads: the smallest values at which each mechanism still takes effect.
_SMALL_FIELDS: Mapping[str, int] = {
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
# Layers of a vision tower, whose configurations use either field; the self-tests have no images.
_VISION_LAYERS: Mapping[str, int] = {"depth": 2, "num_hidden_layers": 2}
_ROPE_SECTIONS = "mrope_section"
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def shrunken_model(
    architecture: type[Any], config: Any, *, layers: int, attention: str | None = None, dtype: str = "float32"
) -> Any:
    """Return a model of the same class on the CPU: narrow if the architecture allows it, else of full width.

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
        _check_forward(model)
    except Exception:  # noqa: BLE001 any error of a narrow copy leads to one of full width, whose errors count
        model = architecture._from_config(few_layers(config, layers), dtype=dtype, **choices)
    return model


def _check_forward(model: Any) -> None:
    """Run one short document through a narrow copy; incompatible widths raise an error here."""
    if model.device.type == "cpu" and model.config._attn_implementation in ("eager", "sdpa"):
        with torch.no_grad():
            model(torch.arange(3)[None], use_cache=False)


def narrow(config: Any) -> Any:
    """Return a copy of a configuration with small widths and counts, and the same number of layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name in type(config).sub_configs:
        part = getattr(config, name)
        if part is not text:
            _limit_fields(part, _VISION_LAYERS)
    if getattr(text, "is_heterogeneous", False):
        text.per_layer_config = None  # widths of some of the layers alone, such as Gemma 4's heads of full attention
    heads = getattr(text, "num_attention_heads", None) or 1
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    new_key_value_heads = min(key_value_heads, 2)
    new_heads = new_key_value_heads * min(heads // key_value_heads, 4)
    hidden = new_heads * _HEAD_DIM
    _narrow_rotation(text, getattr(text, "head_dim", None) or text.hidden_size // heads)
    widths = {
        **_SMALL_FIELDS,
        "num_attention_heads": new_heads,
        "num_key_value_heads": new_key_value_heads,
        "head_dim": _HEAD_DIM,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "ffn_dim": 2 * hidden,
        "word_embed_proj_dim": hidden,
    }
    _limit_fields(text, widths)
    for name in _SPECIAL_TOKENS:
        if getattr(text, name, None) is not None:
            setattr(text, name, 0)
    return config


def _limit_fields(config: Any, limits: Mapping[str, int]) -> None:
    """Reduce fields of a configuration to at most these values."""
    for name, value in limits.items():
        current = getattr(config, name, None)
        # Only single numbers are replaced: None means that the model lacks the part, and lists have their own meaning.
        if isinstance(current, int) and not isinstance(current, bool) and current > value:
            with contextlib.suppress(AttributeError):  # read-only: derived from other fields
                setattr(config, name, value)


def _narrow_rotation(text: Any, head_dim: int) -> None:
    """Scale the sections of multimodal RoPE (time, height, width) from this head size to the narrow one."""
    rope = getattr(text, "rope_parameters", None) or {}
    sections = rope.get(_ROPE_SECTIONS)
    if sections and head_dim > _HEAD_DIM:
        ends = [round(end * _HEAD_DIM / head_dim) for end in accumulate(sections)]
        rope[_ROPE_SECTIONS] = [end - start for start, end in pairwise([0, *ends])]


def first_layers(config: Any, layers: int) -> Any:
    """Return a configuration that keeps the first ``layers`` layers, or all if there are fewer."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    total = text.num_hidden_layers
    count = min(layers, total)
    unshared = total - (getattr(text, _SHARED_KV_LAYERS, None) or 0)
    _select_layers(text, range(count), sharing=max(0, count - unshared))
    for name in _LAYER_THRESHOLDS:
        value = getattr(text, name, None)
        if isinstance(value, int):
            setattr(text, name, min(value, count))
    return config


def few_layers(config: Any, layers: int) -> Any:
    """Return a configuration with at least ``layers`` layers, among them one of each type that the configuration lists.

    No layer shares keys and values: the layer that it shares them with may be left out.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    types = getattr(text, "layer_types", None)
    required = sorted({types.index(kind) for kind in types}) if types else []
    others = [index for index in range(text.num_hidden_layers) if index not in required]
    _select_layers(text, sorted({*required, *others[: max(0, layers - len(required))]}), sharing=0)
    return config


def _select_layers(text: Any, indices: Sequence[int], *, sharing: int) -> None:
    count = text.num_hidden_layers
    # Layer types that a class computes from the number of layers are not in `vars`, and cannot be set.
    for name, value in list(vars(text).items()):
        if name in _LAYER_INDEX_FIELDS:
            first = _LAYER_INDEX_FIELDS[name]
            listed = [new + first for new, layer in enumerate(indices) if layer + first in (value or ())]
            setattr(text, name, listed)
        elif isinstance(value, list) and len(value) == count:
            setattr(text, name, [value[index] for index in indices])
    if getattr(text, _SHARED_KV_LAYERS, None):
        setattr(text, _SHARED_KV_LAYERS, sharing)
    text.num_hidden_layers = len(indices)
    if getattr(text, "is_heterogeneous", False):
        # Fields of single layers, by their indices.
        by_layer = {int(layer): values for layer, values in text.to_dict()["per_layer_config"].items()}
        text.per_layer_config = {new: by_layer[layer] for new, layer in enumerate(indices) if layer in by_layer}
