"""Defines custom operators for attention kernels that PyTorch has none for, with the kernels' allocations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


def defined(
    namespace: str,
    forward: tuple[str, Callable[..., Any]],
    backward: tuple[str, Callable[..., Any]],
    flops: Callable[..., int],
) -> torch.library.Library:
    """Define the operators ``forward`` and ``backward`` of a namespace; the caller keeps the returned library alive.

    Args:
        forward: its schema without the name, and a function that returns its fake results.
        backward: the same for the backward pass.
        flops: returns floating-point operations, given those per query-key pair, head and element, and the arguments.
    """
    library = torch.library.Library(namespace, "DEF")
    # benchmarks/benchmark_flash_attention.py of https://github.com/Dao-AILab/flash-attention: 4 operations per
    # query-key pair, head and element in the forward pass, 2.5 times that in the backward pass.
    for name, (schema, make), per_pair in (("forward", forward, 4), ("backward", backward, 10)):
        library.define(f"{name}{schema}")
        torch.library.register_fake(f"{namespace}::{name}", make, lib=library)
        flop_registry[getattr(getattr(torch.ops, namespace), name)] = partial(flops, per_pair)
    return library
