"""What a traced run would have shown on a GPU: allocated and reserved bytes, phase by phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from autotune.virtual import trace
from autotune.virtual.allocator import CachingAllocator
from autotune.virtual.blocks import Block
from autotune.virtual.records import Place, Trace
from autotune.virtual.replay import _first_products, _workspace_bytes


@dataclass(frozen=True)
class Shown:
    """What ``torch.cuda`` would have said.

    Attributes:
        allocated_bytes: after each phase, by its name (``memory_allocated``).
        peak_allocated_bytes: of the whole run (``max_memory_allocated``).
        peak_reserved_bytes: of the whole run (``max_memory_reserved``).
    """

    allocated_bytes: dict[str, int]
    peak_allocated_bytes: int
    peak_reserved_bytes: int


def shown_by(run: Callable[[torch.device], None], capability: tuple[int, int]) -> Shown:
    """Trace a function of a device and return what the GPU would have shown, with ``empty_cache`` after each phase."""
    traced = trace(run, capability=capability)
    return _shown(traced, capability)


def _shown(traced: Trace, capability: tuple[int, int]) -> Shown:
    allocator = CachingAllocator()
    workspace, first_products = _workspace_bytes(capability), _first_products(traced)
    ends = {phase.end_event: phase.name for phase in traced.phases}
    blocks: dict[int, tuple[int, Block]] = {}
    allocated: dict[str, int] = {}
    for index, event in enumerate(traced.events):
        while first_products and event.operator >= first_products[0]:
            first_products.pop(0)
            allocator.allocate(workspace)
        if index in ends:
            allocated[ends[index]] = allocator.allocated_bytes
            allocator.empty_cache()
        if event.place is not Place.DEVICE:
            continue
        size, block = blocks.pop(event.storage, (0, None))
        wanted = size + event.change_bytes
        if wanted:
            blocks[event.storage] = (wanted, allocator.allocate(wanted))
        if block is not None:
            allocator.free(block)
    return Shown(allocated, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)
