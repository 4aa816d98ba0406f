"""Makes smaller copies of a model: its first layers at full width, or few narrow layers that run in seconds."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

# Fields with a layer count or index at which the kind of layer changes.
_COUNTS = ("max_window_layers", "first_k_dense_replace")
_LISTING: Mapping[str, int] = {
    "hybrid_layer_ids": 0,
    "mlp_only_layers": 0,
    "moe_layers": 0,
    "cross_attention_layers": 0,
    "rope_scaling_layers": 0,
    "ple_layer_ids": 1,
}
"""Fields that list some of the layers by their indices, and the index of the first layer."""
FEWEST_BUILT = 2
"""Layers of a copy that is not traced: RWKV's classes divide by the number of layers minus one."""
# Field with the number of layers, the last ones, that attend to keys and values of earlier layers (Gemma 3n and 4).
_SHARING = "num_kv_shared_layers"

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
# Layers of a vision tower, by either of its names: documents of the self-tests have no images.
_TOWER: Mapping[str, int] = {"depth": 2, "num_hidden_layers": 2}
_SECTIONS = "mrope_section"
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
    """Return a copy of a configuration with small widths and counts, and the same number of layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for name in type(config).sub_configs:
        part = getattr(config, name)
        if part is not text:
            _lower(part, _TOWER)
    if getattr(text, "is_heterogeneous", False):
        text.per_layer_config = None  # widths of some of the layers alone, such as Gemma 4's heads of full attention
    heads = getattr(text, "num_attention_heads", None) or 1
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    new_key_value_heads = min(key_value_heads, 2)
    new_heads = new_key_value_heads * min(heads // key_value_heads, 4)
    hidden = new_heads * _HEAD_DIM
    _narrow_rotation(text, getattr(text, "head_dim", None) or text.hidden_size // heads)
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
    _lower(text, widths)
    for name in _SPECIAL_TOKENS:
        if getattr(text, name, None) is not None:
            setattr(text, name, 0)
    return config


def _lower(config: Any, most: Mapping[str, int]) -> None:
    """Reduce fields of a configuration to at most these values."""
    for name, value in most.items():
        present = getattr(config, name, None)
        # Only single numbers are replaced: None means that the model lacks the part, and lists have their own meaning.
        if isinstance(present, int) and not isinstance(present, bool) and present > value:
            with contextlib.suppress(AttributeError):  # read-only: derived from other fields
                setattr(config, name, value)


def _narrow_rotation(text: Any, head_dim: int) -> None:
    """Scale the sections of multimodal RoPE (time, height, width) from this head size to the narrow one."""
    rope = getattr(text, "rope_parameters", None) or {}
    sections = rope.get(_SECTIONS)
    if sections and head_dim > _HEAD_DIM:
        ends = [round(end * _HEAD_DIM / head_dim) for end in accumulate(sections)]
        rope[_SECTIONS] = [end - start for start, end in pairwise([0, *ends])]


def first_layers(config: Any, layers: int) -> Any:
    """Return a configuration that keeps the first ``layers`` layers, or all if there are fewer."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    whole = text.num_hidden_layers
    count = min(layers, whole)
    own = whole - (getattr(text, _SHARING, None) or 0)
    _keep(text, range(count), sharing=max(0, count - own))
    for name in _COUNTS:
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
    kept = sorted({types.index(kind) for kind in types}) if types else []
    others = [index for index in range(text.num_hidden_layers) if index not in kept]
    _keep(text, sorted({*kept, *others[: max(0, layers - len(kept))]}), sharing=0)
    return config


def _keep(text: Any, kept: Sequence[int], *, sharing: int) -> None:
    count = text.num_hidden_layers
    # Layer types that a class computes from the number of layers are not in `vars`, and cannot be set.
    for name, value in list(vars(text).items()):
        if name in _LISTING:
            first = _LISTING[name]
            listed = [place + first for place, layer in enumerate(kept) if layer + first in (value or ())]
            setattr(text, name, listed)
        elif isinstance(value, list) and len(value) == count:
            setattr(text, name, [value[index] for index in kept])
    if getattr(text, _SHARING, None):
        setattr(text, _SHARING, sharing)
    text.num_hidden_layers = len(kept)
    if getattr(text, "is_heterogeneous", False):
        # Fields of single layers, by their indices.
        own = {int(layer): values for layer, values in text.to_dict()["per_layer_config"].items()}
        text.per_layer_config = {place: own[layer] for place, layer in enumerate(kept) if layer in own}
