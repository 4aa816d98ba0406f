"""The most bytes that were live at once, out of the events of a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotune.virtual.records import Category, MemoryEvent, Peak, Place


def peak_of(
    events: Sequence[MemoryEvent],
    categories: Mapping[int, Category],
    place: Place,
    first: int = 0,
    end: int | None = None,
) -> Peak:
    """Return the most bytes that were live at once after one of the events from ``first`` to before ``end``.

    What lives when the event ``first`` happens counts as well.
    """
    end = len(events) if end is None else end
    total = best = 0
    at = -1
    for index, event in enumerate(events[:end]):
        if event.place is place:
            total += event.change_bytes
        if index >= first - 1 and (total > best or at < 0):
            best, at = total, index
    parts: dict[Category, int] = {}
    for event in events[: at + 1]:
        if event.place is place:
            category = categories.get(event.storage, Category.TEMPORARY)
            parts[category] = parts.get(category, 0) + event.change_bytes
    return Peak(best, at, {category: size for category, size in parts.items() if size})
