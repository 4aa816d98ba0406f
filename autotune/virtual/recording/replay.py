"""Replays the memory events of a trace, with cuBLAS's workspaces, through the simulated caching allocator."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autotune.units import MIB
from autotune.virtual.allocator.blocks import Block
from autotune.virtual.allocator.caching import CachingAllocator, OutOfMemoryError
from autotune.virtual.recording.records import CUBLAS_WORKSPACE, EMPTY_CACHE, MemoryEvent, Place, Trace

# The workspace of cuBLAS and cuBLASLt, which PyTorch allocates from the caching allocator and never frees: 32 MiB on
# Hopper and Blackwell, otherwise two of 4096 KiB and eight of 16 KiB (aten/src/ATen/cuda/CublasHandlePool.cpp,
# parseChosenWorkspaceSize and unified_cublas_and_lt_workspaces). There is one per handle and stream, and the threads of
# the forward and of the backward pass each have a handle.
_WORKSPACE_BYTES = 2 * 4 * MIB + 8 * 16 * 1024
_LARGE_WORKSPACE_BYTES = 32 * MIB
_LARGE_WORKSPACE_GENERATIONS = (9, 10, 12)


def replay(
    traced: Trace,
    *,
    capability: tuple[int, int] | None = None,
    limit_bytes: int | None = None,
    expandable_segments: bool = False,
    emptied: bool = False,
) -> CachingAllocator:
    """Replay a trace's device allocations and frees through a caching allocator, and return the allocator.

    Args:
        capability: CUDA compute capability of the GPU, which determines the size of cuBLAS's workspace (allocated at
            the first matrix product of each pass). None: the size on most GPUs.
        limit_bytes: maximum reserved bytes, or None.
        expandable_segments: PyTorch's setting of that name.
        emptied: whether the cache is emptied before every backward pass, as transformers' Trainer does with
            ``torch_empty_cache_steps=1``.

    Raises:
        OutOfMemoryError: an allocation does not fit the limit.
    """
    allocator = CachingAllocator(limit_bytes, expandable_segments=expandable_segments)
    multiplied: set[bool] = set()
    blocks: dict[int, tuple[int, Block]] = {}
    in_backward = False
    for event in traced.events:
        if emptied and event.operator >= 0:
            before, in_backward = in_backward, traced.operators[event.operator].in_backward
            if in_backward and not before:
                allocator.empty_cache()
        if event.storage == EMPTY_CACHE:
            allocator.empty_cache()
        elif event.storage == CUBLAS_WORKSPACE:
            # Once per pass, even if the trace contains repeated steps.
            product = traced.operators[event.operator]
            if product.in_backward not in multiplied:
                multiplied.add(product.in_backward)
                allocator.allocate(workspace_bytes(capability))
        _apply(event, allocator, blocks, traced.streams)
    return allocator


_HEADROOM = 0.05
"""Headroom over the peak allocated bytes at which replays with a limit start, and step by which the limit is raised."""


def short_of_memory(unlimited: CachingAllocator, run: Callable[..., CachingAllocator]) -> CachingAllocator:
    """Return the allocator after a replay on a device that is short of memory.

    Without a limit, the allocator caches freed blocks: for an 8B model under ZeRO-2 it reserves 52.7 GiB, of which 34.2
    are allocated; with a limit of 36 GiB it reserves 35.8. So the limit here is 5 % above the peak allocated bytes, and
    is raised in steps of 5 % until fragmentation does not cause an out-of-memory error.

    Args:
        unlimited: the allocator after the replay without a limit.
        run: replays with the argument ``limit_bytes``.
    """
    limit_bytes = round((1 + _HEADROOM) * unlimited.peak_allocated_bytes)
    while limit_bytes < unlimited.peak_reserved_bytes:
        try:
            return run(limit_bytes=limit_bytes)
        except OutOfMemoryError:
            limit_bytes = round((1 + _HEADROOM) * limit_bytes)
    return unlimited


def _apply(
    event: MemoryEvent, allocator: CachingAllocator, blocks: dict[int, tuple[int, Block]], streams: Mapping[int, int]
) -> None:
    """Apply a device event to the allocator; ``blocks`` maps each storage to its size and block."""
    if event.place is not Place.DEVICE or not event.change_bytes:
        return
    size, block = blocks.pop(event.storage, (0, None))
    new_size = size + event.change_bytes
    # A storage that grows is copied to a new block before the old one is freed.
    if new_size:
        blocks[event.storage] = (new_size, allocator.allocate(new_size, streams.get(event.storage, 0)))
    if block is not None:
        allocator.free(block)


def workspace_bytes(capability: tuple[int, int] | None) -> int:
    """Return the bytes of cuBLAS's workspace, the only property of a GPU that a replay depends on."""
    generation = capability[0] if capability else 0
    return _LARGE_WORKSPACE_BYTES if generation in _LARGE_WORKSPACE_GENERATIONS else _WORKSPACE_BYTES
