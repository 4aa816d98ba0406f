"""Reduces the number of layers in a model's configuration, leaving the layers themselves unchanged."""

from __future__ import annotations

import copy
from typing import Any

# Fields of configurations with one entry per layer.
_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type")
# Fields with a layer count or index at which the kind of layer changes.
_COUNTS = ("max_window_layers", "first_k_dense_replace")


def first_layers(config: Any, layers: int) -> Any:
    """Return a configuration that keeps the first ``layers`` layers, or all if there are fewer."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    count = min(layers, text.num_hidden_layers)
    for name in _PER_LAYER:
        value = getattr(text, name, None)
        if isinstance(value, list):
            setattr(text, name, value[:count])
    for name in _COUNTS:
        value = getattr(text, name, None)
        if isinstance(value, int):
            setattr(text, name, min(value, count))
    text.num_hidden_layers = count
    return config
