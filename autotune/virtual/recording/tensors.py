"""Fast access to an operator's arguments, and to the tensors among them; called for every operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

VIRTUAL = "virtual"
"""Type of the virtual GPU."""
_NUMBER_TYPES = frozenset({int, float, bool})


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples and lists, the only containers in operators' arguments and results."""
    # PyTorch's tree_leaves supports more kinds of containers, and takes ten times as long.
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _collect(item, found)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor; for a ``DTensor``, that of the shard on this rank."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.untyped_storage()


def type_of_device(tensor: torch.Tensor) -> str:
    """Return the type of a tensor's device without ``tensor.device``, which dispatches an operator on a fake tensor."""
    return str((tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type)


@cache
def operator_name(func: Any) -> str:
    """Return an operator's full name, such as ``aten.mm.default``."""
    return str(func)


@cache
def mutated_arguments(func: Any) -> tuple[str, ...]:
    """Return the names of the arguments that an operator writes to."""
    aliases = ((argument.name, argument.alias_info) for argument in func._schema.arguments)
    return tuple(name for name, alias in aliases if alias is not None and alias.is_write)


@cache
def _positions(func: Any) -> dict[str, int]:
    return {argument.name: position for position, argument in enumerate(func._schema.arguments)}


def argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Return an argument by its name in the schema, or None if it does not exist or was not passed."""
    if name in kwargs:
        return kwargs[name]
    position = _positions(func).get(name)
    return args[position] if position is not None and position < len(args) else None


def map_tree(tree: Any, kind: type[Any] | tuple[type[Any], ...], change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to each object of type ``kind`` in nested mappings, lists and tuples.

    Mappings, such as the result of an image processor, become dictionaries. PyTorch's ``tree_map_only`` takes many
    times as long for the token lists of batches.
    """
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, Mapping):
        return {name: map_tree(value, kind, change) for name, value in tree.items()}
    if type(tree) in (list, tuple):
        if all(type(item) in _NUMBER_TYPES for item in tree):
            return tree
        return type(tree)(map_tree(item, kind, change) for item in tree)
    return tree
