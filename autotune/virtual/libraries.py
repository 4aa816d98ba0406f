"""What libraries do differently when they notice that tensors have no storage, and how they are kept from it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

# State of the CPU's generator (aten/src/ATen/CPUGeneratorImpl.cpp, CPUGeneratorImplState).
_RNG_STATE_BYTES = 5056


@contextmanager
def unnoticed() -> Iterator[None]:
    """Have transformers take tensors without storage for ordinary ones, and checkpointing keep the generator's state.

    Otherwise transformers builds the attention masks that an exported graph needs, not those of a training step.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    with ExitStack() as stack:
        if module is not None:
            stack.enter_context(mock.patch.object(module, "is_fake_tensor", lambda tensor: False))
        stack.enter_context(mock.patch.object(torch, "get_rng_state", _rng_state))
        stack.enter_context(mock.patch.object(torch, "set_rng_state", lambda state: None))
        yield


def _rng_state() -> torch.Tensor:
    return torch.empty(_RNG_STATE_BYTES, dtype=torch.uint8, device="cpu")
