"""Workspaces of CUDA's reductions: the input cast to the type that is accumulated, and partial results of blocks."""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
KERNELS = frozenset({_aten.sum, _aten.mean, _aten.prod, _aten.cumsum, _aten.cumprod})
"""Reductions whose input is cast first."""
_BY_BLOCKS = frozenset({_aten.sum, _aten.mean})
# aten/src/ATen/native/cuda/Reduce.cuh: ReduceConfig and setReduceConfig.
_WARP = 32
_MOST_THREADS = 512
_OUTPUTS_PER_THREAD = 4
_FEWEST_PER_THREAD, _MOST_PER_THREAD = 16, 256
_SEMAPHORE_BYTES = 4
# Multiprocessors of one GPU of each compute capability (V100, T4, A100, RTX 3090, L40S, H100, B200, RTX PRO 6000), and
# the threads that each has at most (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
_PROCESSORS = {
    (7, 0): (80, 2048), (7, 5): (40, 1024), (8, 0): (108, 2048), (8, 6): (82, 1536), (8, 9): (142, 1536),
    (9, 0): (132, 2048), (10, 0): (148, 2048), (12, 0): (188, 1536),
}  # fmt: skip


def workspaces(func: Any, args: Any, result: torch.Tensor, capability: tuple[int, int]) -> tuple[int, ...]:
    """Return the bytes of the blocks that a reduction allocates and frees before it returns.

    Args:
        func: one of :data:`KERNELS`.
        args: its positional arguments.
        result: its return value.
        capability: compute capability of the GPU.
    """
    given = args[0]
    # aten/src/ATen/native/ReduceOps.cpp, make_reduction_from_out_ty and sum_out: the input is cast to the type of the
    # result first, except from half precision to float32, for which CUDA's kernels accumulate as they read.
    cast = given.dtype != result.dtype and not (given.dtype in _HALF and result.dtype == torch.float32)
    casts = (given.numel() * result.itemsize,) if cast else ()
    if func.overloadpacket not in _BY_BLOCKS or not result.numel():
        return casts
    kept = given.shape[-1] if _keeps_neighbours(given, args[1:2]) else 1
    return (*casts, *_partial_results(given.numel(), kept, result, capability))


def _partial_results(elements: int, kept: int, result: torch.Tensor, capability: tuple[int, int]) -> tuple[int, ...]:
    """Return the bytes of blocks' partial results, and of their semaphores; none for sums over the last dimension.

    Those have partial results of a few KiB, which are left out.

    Args:
        elements: of the input.
        kept: size of the last dimension, or 1 if it is summed over.
        result: the sums.
        capability: compute capability of the GPU.
    """
    outputs, inputs = result.numel(), elements // result.numel()
    if kept == 1 or inputs == 1:
        return ()
    vector = next(size for size in (_OUTPUTS_PER_THREAD, 2, 1) if kept % size == 0)
    most = _MOST_THREADS // vector
    first, second = (_power_of_two_below(min(count, most)) for count in (outputs // vector, inputs))
    height = min(second, most // min(first, _WARP))
    width = min(first, most // height)
    # Each thread of a block's column first takes its share of the inputs, or where they are few an output of its own.
    if inputs < min(height * _FEWEST_PER_THREAD, _MOST_PER_THREAD):
        return ()
    per_thread = -(-inputs // height)
    columns = -(-outputs // (width * vector))
    processors, threads = _PROCESSORS.get(capability, _PROCESSORS[8, 0])
    blocks = processors * (threads // (width * height))
    if per_thread < _MOST_PER_THREAD or columns > blocks:
        return ()
    share = max(min(-(-blocks // columns), -(-per_thread // _FEWEST_PER_THREAD)), -(-per_thread // _MOST_PER_THREAD))
    if share == 1:
        return ()
    accumulated = max(4, result.itemsize)
    return (accumulated * outputs * share * width * vector, _SEMAPHORE_BYTES * columns)


def _keeps_neighbours(given: torch.Tensor, dimensions: Any) -> bool:
    """Whether elements that are neighbours in memory belong to different results.

    Args:
        given: the input.
        dimensions: a tuple of the argument that names those summed over, or an empty one if all are.
    """
    if not given.dim() or given.stride(-1) != 1 or not dimensions or not dimensions[0]:
        return False
    named = dimensions[0] if isinstance(dimensions[0], (tuple, list)) else [dimensions[0]]
    return all(number % given.dim() != given.dim() - 1 for number in named)


def _power_of_two_below(count: int) -> int:
    return 1 << (max(count, 1).bit_length() - 1)
