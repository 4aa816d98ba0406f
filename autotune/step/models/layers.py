"""Makes a model's configuration with fewer layers, leaving the layers themselves unchanged."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

# Fields with a layer count or index at which the kind of layer changes.
_COUNTS = ("max_window_layers", "first_k_dense_replace")
FEWEST_BUILT = 2
"""Layers of a copy that is not traced: RWKV's classes divide by the number of layers less one."""
# Field with the number of layers, the last ones, that attend to keys and values of earlier layers (Gemma 3n and 4).
_SHARING = "num_kv_shared_layers"


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

    Each of them has keys and values of its own: those that it may share may be of a layer that is left out.
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
    # Types of layers that a class computes from the number of layers are no fields, and cannot be set.
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(text, name, [value[index] for index in kept])
    if getattr(text, _SHARING, None):
        setattr(text, _SHARING, sharing)
    text.num_hidden_layers = len(kept)
    if getattr(text, "is_heterogeneous", False):
        # Fields of single layers, by their indices.
        own = {int(layer): values for layer, values in text.to_dict()["per_layer_config"].items()}
        text.per_layer_config = {place: own[layer] for place, layer in enumerate(kept) if layer in own}
