"""Patches for libraries that behave differently when they detect fake tensors."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from unittest import mock

import torch

Patches = Iterator[AbstractContextManager[object]]
"""Context managers that a trace enters in order; each is entered before the next one is created."""
_RNG_STATE_BYTES = torch.get_rng_state().numel()


def fake_tensors_accepted(assume: Callable[[str], None]) -> Patches:
    """Patch transformers to treat fake tensors as ordinary ones, and checkpointing to store the generator's state.

    For fake tensors, transformers builds the attention masks of an exported graph, not those of a training step.

    Args:
        assume: called with each warning of transformers, from 5.17 on, that a kernel package of a layer is missing.
    """
    yield warnings.catch_warnings()
    # torch.Tensor.__deepcopy__ reads the address of every tensor, to detect tensors without storage.
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    module = sys.modules.get("transformers.utils.import_utils")
    if module is not None:
        yield mock.patch.object(module, "is_fake_tensor", lambda tensor: False)
        logger = import_module("transformers.integrations.hub_kernels").logger

        def warned(text: str) -> None:
            if "falling back" in text:
                assume(f"{text.partition('. ')[0]} here: slower, larger code is traced")

        yield mock.patch.object(logger, "warning_once", warned)
    functional = sys.modules.get("bitsandbytes.functional")
    if functional is not None:
        # CUDA managed memory, whose pages migrate between host and device on access; PyTorch does not count it.
        yield mock.patch.multiple(
            functional,
            get_paged=_get_paged,
            prefetch_tensor=lambda *args, **kwargs: None,
            fill=lambda tensor, value, **more: tensor.fill_(value),
        )
    modules = sys.modules.get("bitsandbytes.nn.modules")
    if modules is not None:
        yield mock.patch.object(modules, "fix_4bit_weight_quant_state_from_module", _restore_quant_state)
    state = partial(torch.empty, _RNG_STATE_BYTES, dtype=torch.uint8, device="cpu")
    yield mock.patch.multiple(torch, get_rng_state=state, set_rng_state=lambda state: None)


def _restore_quant_state(module: torch.nn.Module) -> None:
    """Restore the quantisation state that a 4-bit weight loses when FSDP2 gathers it, without a change of its class."""
    if getattr(module.weight, "quant_state", None) is None:
        module.weight.quant_state = module.quant_state


def _get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> torch.Tensor:
    paged = torch.empty(shape, dtype=dtype, device="cpu")
    paged.is_paged = True
    return paged
