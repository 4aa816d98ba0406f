"""The tensors among an operator's arguments and results, and where they lie: asked at every operator, so made quick."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in tuples and lists, which are the containers that operators take and give, in their order."""
    # PyTorch's tree_leaves knows more kinds of containers, and takes ten times as long.
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _collect(item, found)


def type_of_device(tensor: torch.Tensor) -> str:
    """Return the type of a tensor's device; a storage-less one that is asked itself has an operator dispatched."""
    return str((tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type)


@cache
def operator_name(func: Any) -> str:
    """Return an operator's whole name, such as ``aten.mm.default``."""
    return str(func)
