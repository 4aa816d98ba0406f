"""Defines custom operators, with their fake kernels and FLOP formulas, for attention kernels outside PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from autotune.virtual.recording.tensors import argument


def define_operators(
    namespace: str,
    forward: tuple[str, Callable[..., Any]],
    backward: tuple[str, Callable[..., Any]],
    heads: int,
) -> torch.library.Library:
    """Define the operators ``forward`` and ``backward`` of a namespace; the caller keeps the returned library alive.

    Args:
        forward: the schema without the name, and the fake kernel.
        backward: the same for the backward pass.
        heads: the head dimension of the argument ``q``, whose last dimension is the head size. The argument ``pairs``
            is the number of query-key pairs per head.
    """
    library = torch.library.Library(namespace, "DEF")
    # benchmarks/benchmark_flash_attention.py of https://github.com/Dao-AILab/flash-attention: 4 operations per
    # query-key pair, head and element in the forward pass, 2.5 times that in the backward pass.
    for name, (schema, fake_kernel), flops_per_pair in (("forward", forward, 4), ("backward", backward, 10)):
        library.define(f"{name}{schema}")
        torch.library.register_fake(f"{namespace}::{name}", fake_kernel, lib=library)
        packet = getattr(getattr(torch.ops, namespace), name)
        flop_registry[packet] = partial(_flops, packet.default, heads, flops_per_pair)
    return library


def _flops(func: Any, heads: int, flops_per_pair: int, *args: Any, out_val: Any, **kwargs: Any) -> int:
    query, pairs = (argument(func, args, kwargs, name) for name in ("q", "pairs"))
    return int(flops_per_pair * pairs * query.size(heads) * query.size(-1))
