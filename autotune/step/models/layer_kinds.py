"""Determines the kind of each layer of a model from its modules, its parameters and its configuration."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.nn import ModuleList

from autotune.step.models.loading import meta_model
from autotune.step.models.shrink import first_layers

# Lists with an entry per layer that some classes compute from other fields.
_COMPUTED = ("layer_types", "layers_block_type", "kv_sharing_modes")


def layer_kinds(config: Any, model: Any) -> tuple[str, ...]:
    """Return a name for the kind of each layer, in order; layers with equal names have the same structure.

    They have the same modules, parameters and configuration: attention has the same parameters with a sliding window
    as without. Where a copy of fewer layers has others than the model's first ones,
    each layer is of a kind of its own, so that nothing is concluded from a copy.

    Args:
        model: the whole model, on any device.
    """
    text = config.get_text_config()
    count = text.num_hidden_layers
    fewer = -(-count // 2)
    shorter = meta_model(type(model), first_layers(config, fewer))
    paths = _layer_lists(model, count).intersection(_layer_lists(shorter, fewer))
    structures = _structures(model, paths, count)
    if not paths or structures[:fewer] != _structures(shorter, paths, fewer):
        return tuple(map(str, range(count)))
    numbers = {structure: number for number, structure in enumerate(dict.fromkeys(structures))}
    listed = [*_listed(text, count), *_features_added(config, count)]
    return tuple(
        " ".join([*(str(values[layer]) for values in listed), str(numbers[structure])])
        for layer, structure in enumerate(structures)
    )


def _layer_lists(model: Any, count: int) -> set[str]:
    """Return the paths of the lists of as many modules that are not themselves part of a list."""
    return {
        path
        for path, module in model.named_modules()
        if isinstance(module, ModuleList) and len(module) == count and not any(map(str.isdigit, path.split(".")))
    }


def _structures(model: Any, paths: Collection[str], count: int) -> list[tuple[tuple[object, ...], ...]]:
    """Return the classes of the modules and the shapes of the parameters of each layer, by their names.

    A parameter that several layers share is one of the first of them.
    """
    found: list[list[tuple[object, ...]]] = [[] for _ in range(count)]
    named: list[tuple[str, object]] = [(name, type(module).__name__) for name, module in model.named_modules()]
    named += [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    for path in sorted(paths):
        for name, what in named:
            if name.startswith(f"{path}."):
                layer, _, inside = name.removeprefix(f"{path}.").partition(".")
                found[int(layer)].append((path, inside, what))
    return [tuple(parts) for parts in found]


def _listed(text: Any, count: int) -> list[list[object]]:
    """Return the configuration's lists with an entry per layer, except one that has the indices of all layers."""
    named = vars(text) | {name: getattr(text, name, None) for name in _COMPUTED}
    lists = [list(value) for _, value in sorted(named.items()) if isinstance(value, list | tuple)]
    return [values for values in lists if len(values) == count and values != list(range(count))]


def _features_added(config: Any, count: int) -> list[list[object]]:
    """Return for each layer whether a feature of the vision tower is added to what it returns, if there are such.

    Qwen3-VL and its kin add the features of some of the tower's layers after the first layers of the language model
    (``deepstack_visual_embeds`` in ``modeling_qwen3_vl.py``), which no module shows.
    """
    features = getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ()
    return [[layer < len(features) for layer in range(count)]] if features else []
