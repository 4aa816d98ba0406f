"""Determines the kind of each layer of a model from its configuration."""

from __future__ import annotations

from typing import Any

# Index of the first layer with experts (DeepSeek).
_DENSE_FIRST = "first_k_dense_replace"
# Fields with the interval between layers with experts (Qwen's and Llama 4's names), except for the layers listed.
_EXPERTS_EVERY = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", "expert_layer_period")
_DENSE = "mlp_only_layers"


def layer_kinds(config: Any) -> tuple[str, ...]:
    """Return a name for the kind of each layer, in order; layers with equal names have the same structure."""
    text = config.get_text_config()
    count = text.num_hidden_layers
    listed = [
        value
        for name, value in sorted(vars(text).items())
        if isinstance(value, (list, tuple)) and len(value) == count and name != _DENSE
    ]
    kinds = []
    for layer in range(count):
        words = [str(value[layer]) for value in listed]
        words.append(str(layer >= (getattr(text, _DENSE_FIRST, None) or 0)))
        for name in _EXPERTS_EVERY:
            every = getattr(text, name, None)
            if isinstance(every, int) and every > 1:
                words.append(str((layer + 1) % every))
        words.append(str(layer in (getattr(text, _DENSE, None) or ())))
        kinds.append(" ".join(words))
    return tuple(kinds)
