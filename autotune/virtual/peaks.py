"""Computes the live bytes of a trace and their peaks from its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

from autotune.virtual.records import Category, Peak, Place, Trace

Stretch = tuple[int, int]
"""A range of events: the index of the first, and the index after the last."""


def with_peaks(trace: Trace) -> Trace:
    """Return a trace with its peaks, and with the bytes and peaks of its phases.

    Storages that are live when a phase begins are included in its peaks.
    """
    stretches = [(0, len(trace.events)), *((phase.first_event, phase.end_event) for phase in trace.phases)]
    on_device, on_host = (_peaks(trace, place, stretches) for place in (Place.DEVICE, Place.HOST))
    levels = _levels(trace, Place.DEVICE)
    phases = (
        replace(
            phase,
            start_bytes=levels[phase.first_event],
            end_bytes=levels[phase.end_event],
            device_peak=device_peak,
            host_peak=host_peak,
        )
        for phase, device_peak, host_peak in zip(trace.phases, on_device[1:], on_host[1:], strict=True)
    )
    return replace(trace, phases=tuple(phases), device_peak=on_device[0], host_peak=on_host[0])


def _levels(trace: Trace, place: Place) -> list[int]:
    """Return the live bytes at a place before the first event, and after each event."""
    return list(accumulate((event.change_bytes if event.place is place else 0 for event in trace.events), initial=0))


def _peaks(trace: Trace, place: Place, stretches: Iterable[Stretch]) -> list[Peak]:
    """Return the peak of live bytes at a place, for each range of events."""
    levels = _levels(trace, place)
    # Each is the number of events after which a range is at its peak.
    highest = [first + levels[first : end + 1].index(max(levels[first : end + 1])) for first, end in stretches]
    parts: dict[int, dict[Category, int]] = {}
    held: dict[Category, int] = {}
    counted = 0
    for taken in sorted(set(highest)):
        for event in trace.events[counted:taken]:
            if event.place is place:
                category = trace.categories.get(event.storage, Category.TEMPORARY)
                held[category] = held.get(category, 0) + event.change_bytes
        counted = taken
        parts[taken] = {category: size for category, size in held.items() if size}
    return [Peak(levels[taken], taken - 1, parts[taken]) for taken in highest]
