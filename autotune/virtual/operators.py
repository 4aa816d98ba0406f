"""Defines custom operators for attention kernels that PyTorch has none for, with the kernels' allocations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from autotune.virtual.tensors import argument


def defined(
    namespace: str,
    forward: tuple[str, Callable[..., Any]],
    backward: tuple[str, Callable[..., Any]],
    heads: int,
) -> torch.library.Library:
    """Define the operators ``forward`` and ``backward`` of a namespace; the caller keeps the returned library alive.

    Args:
        forward: its schema without the name, and a function that returns its fake results.
        backward: the same for the backward pass.
        heads: dimension of the heads in their argument ``q``, whose last one is the elements; the argument ``pairs`` is
            how many query-key pairs a head has.
    """
    library = torch.library.Library(namespace, "DEF")
    # benchmarks/benchmark_flash_attention.py of https://github.com/Dao-AILab/flash-attention: 4 operations per
    # query-key pair, head and element in the forward pass, 2.5 times that in the backward pass.
    for name, (schema, make), per_pair in (("forward", forward, 4), ("backward", backward, 10)):
        library.define(f"{name}{schema}")
        torch.library.register_fake(f"{namespace}::{name}", make, lib=library)
        packet = getattr(getattr(torch.ops, namespace), name)
        flop_registry[packet] = partial(_flops, packet.default, heads, per_pair)
    return library


def _flops(func: Any, heads: int, per_pair: int, *args: Any, out_val: Any, **kwargs: Any) -> int:
    query, pairs = (argument(func, args, kwargs, name) for name in ("q", "pairs"))
    return int(per_pair * pairs * query.size(heads) * query.size(-1))
