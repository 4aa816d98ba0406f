"""Processes images on real tensors where a trainer does so within a step that is traced."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import torch

from autotune.virtual import adopt, for_real


def processing_for_real(processor: Any) -> Any:
    """Return a processor that reads images on real tensors, outside of PyTorch's allocators, also within a trace."""
    own: Any = type(processor)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with for_real():
            made = own.__call__(self, *args, **kwargs)
            arrays = {name: _as_array(value) for name, value in made.items()}
        made.data = adopt(arrays)
        return made

    found = copy(processor)
    found.__class__ = type(own.__name__, (own,), {"__call__": call})
    return found


def _as_array(value: Any) -> Any:
    """Return tensors, and lists of arrays, as one array; anything else, such as lists of tokens, as it is."""
    if isinstance(value, torch.Tensor):
        return value.numpy().copy()
    is_arrays = isinstance(value, list) and any(isinstance(item, np.ndarray) for item in value)
    return np.array(value) if is_arrays else value
