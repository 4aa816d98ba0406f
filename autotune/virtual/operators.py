"""Operators of our own, for attention kernels that PyTorch has none for: they allocate what the kernels do."""

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
    """Define the operators ``forward`` and ``backward`` of a namespace; what is returned has to be kept.

    Args:
        forward: its schema without the name, and a function that makes its results.
        backward: the same of the backward pass.
        flops: floating-point operations, from those per pair of query and key, head and element, and the arguments.
    """
    library = torch.library.Library(namespace, "DEF")
    # benchmarks/benchmark_flash_attention.py of https://github.com/Dao-AILab/flash-attention: 4 operations per pair of
    # query and key, head and element forwards, 2.5 times that backwards.
    for name, (schema, make), per_pair in (("forward", forward, 4), ("backward", backward, 10)):
        library.define(f"{name}{schema}")
        torch.library.register_fake(f"{namespace}::{name}", make, lib=library)
        flop_registry[getattr(getattr(torch.ops, namespace), name)] = partial(flops, per_pair)
    return library
