"""What a traced run would have shown on a GPU: allocated and reserved bytes, phase by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autotune.virtual import trace
from autotune.virtual.allocator import CachingAllocator
from autotune.virtual.replay import replay
from benchmarks.published.tables import Outcome


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
    allocated: dict[str, int] = {}

    def after_phase(name: str, allocator: CachingAllocator) -> None:
        allocated[name] = allocator.allocated_bytes
        allocator.empty_cache()

    found = replay(trace(run, capability=capability), capability=capability, after_phase=after_phase)
    return Shown(allocated, found.peak_allocated_bytes, found.peak_reserved_bytes)


def measured(
    training: Callable[[Mapping[str, Any], Callable[[int], None]], Callable[[torch.device], None]],
    figures: Callable[[Shown], dict[str, int]],
    settings: Mapping[str, Any],
    capability: tuple[int, int],
) -> Outcome:
    """Trace a training and return its figures, with its number of trainable parameters and the seconds that it took."""
    started, counted = time.perf_counter(), list[int]()
    shown = shown_by(training(settings, counted.append), capability)
    return Outcome(figures(shown), counted[-1], "", time.perf_counter() - started)
