"""Computes the peak of live bytes from the events of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from autotune.virtual.records import Category, MemoryEvent, Peak, Place

Stretch = tuple[int, int]
"""A range of events: the index of the first, and the index after the last."""


def peaks_of(
    events: Sequence[MemoryEvent], categories: Mapping[int, Category], place: Place, stretches: Iterable[Stretch]
) -> list[Peak]:
    """Return, for each range of events, the peak of live bytes at a place.

    Storages that are live when the range begins are included.
    """
    levels = list(accumulate(event.change_bytes if event.place is place else 0 for event in events))
    highest = []
    for first, end in stretches:
        start = max(0, first - 1)
        looked_at = levels[start:end]
        highest.append(start + looked_at.index(max(looked_at)) if looked_at else -1)
    parts: dict[int, dict[Category, int]] = {-1: {}}
    held: dict[Category, int] = {}
    counted = 0
    for index in sorted(set(highest) - {-1}):
        for event in events[counted : index + 1]:
            if event.place is place:
                category = categories.get(event.storage, Category.TEMPORARY)
                held[category] = held.get(category, 0) + event.change_bytes
        counted = index + 1
        parts[index] = {category: size for category, size in held.items() if size}
    return [Peak(levels[index] if index >= 0 else 0, index, parts[index]) for index in highest]
