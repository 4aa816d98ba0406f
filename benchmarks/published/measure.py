"""The figures that a traced run would show on a GPU: allocated and reserved bytes, phase by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autotune.virtual import trace
from autotune.virtual.recording.records import EMPTY_CACHE, MemoryEvent, Place
from autotune.virtual.recording.replay import replay
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
    """Trace a function of a device, and return the GPU's figures, with ``empty_cache`` after each phase."""
    traced = trace(run, capability=capability)
    events: list[MemoryEvent] = []
    allocated: dict[str, int] = {}
    ends = {phase.end_event: phase.name for phase in traced.phases}
    for index, event in enumerate(traced.events):
        if index in ends:
            so_far = replay(replace(traced, events=tuple(events)), capability=capability)
            allocated[ends[index]] = so_far.allocated_bytes
            events.append(MemoryEvent(0, Place.DEVICE, EMPTY_CACHE))
        events.append(event)
    found = replay(replace(traced, events=tuple(events)), capability=capability)
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
