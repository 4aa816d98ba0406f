"""From a trace to the course of memory through its steady optimizer step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from autotune.core.step_time import StepTime
from autotune.core.timeline import Part, Section
from autotune.virtual.costs import Work
from autotune.virtual.records import Category, Phase, Place, Trace

MICRO_BATCH = "micro-batch"
"""Name of the phase that each micro-batch has to be."""

Timing = Callable[[Iterable[Work]], StepTime]

_Moment = tuple[int, str, dict[str, int]]


def sections(trace: Trace, step: Phase, timing: Timing | None = None) -> tuple[Section, ...]:
    """Return what happens before an optimizer step at its worst, and then in each part of it.

    Args:
        step: the phase of the optimizer step; phases inside it named :data:`MICRO_BATCH` are its micro-batches.
        timing: says how long operators take on the device that is planned for; None: no times.
    """
    inside = [
        phase
        for phase in trace.phases
        if phase.name == MICRO_BATCH and step.first_event <= phase.first_event < step.end_event
    ]
    inside.sort(key=lambda phase: phase.first_event)
    moments = list(_moments(trace, step.end_event))
    before = max(
        (moment for moment in moments if moment[0] < step.first_event),
        key=lambda moment: sum(moment[2].values()),
        default=None,
    )
    start = [(0, "", before[2] if before else {})]
    found = [_section(trace, Part.BEFORE, start, (0, step.first_event), None)]
    event, operator = step.first_event, step.first_operator
    for part, phase in zip((Part.FIRST_MICRO_BATCH, Part.FURTHER_MICRO_BATCH), inside, strict=False):
        time = timing(_works(trace, operator, phase.end_operator)) if timing else None
        found.append(_section(trace, part, moments, (event, phase.end_event), time))
        event, operator = phase.end_event, phase.end_operator
    time = timing(_works(trace, operator, step.end_operator)) if timing else None
    return (*found, _section(trace, Part.OPTIMIZER, moments, (event, step.end_event), time))


def _works(trace: Trace, first: int, end: int) -> Iterable[Work]:
    return (operator.work for operator in trace.operators[first:end])


def _section(
    trace: Trace, part: Part, moments: list[_Moment], events: tuple[int, int], time: StepTime | None
) -> Section:
    first, end = events
    chosen = [moment for moment in moments if first <= moment[0] < end]
    names = sorted({name for _, _, levels in chosen for name in levels})
    levels = {name: tuple(moment[2].get(name, 0) for moment in chosen) for name in names}
    host = host_peak = 0
    for index, event in enumerate(trace.events[:end]):
        if event.place is Place.HOST:
            host += event.change_bytes
        if index >= first:
            host_peak = max(host_peak, host)
    return Section(part, tuple(moment[1] for moment in chosen), levels, host_peak, time)


def _moments(trace: Trace, end: int) -> Iterator[_Moment]:
    """Yield index, operator and levels of every event after which the device's bytes go down, or that is the last."""
    levels: dict[str, int] = defaultdict(int)
    rising: tuple[int, str] | None = None
    for index, event in enumerate(trace.events[:end]):
        if event.place is not Place.DEVICE:
            continue
        if event.change_bytes < 0 and rising is not None:
            yield (*rising, {name: size for name, size in levels.items() if size})
            rising = None
        levels[trace.categories.get(event.storage, Category.TEMPORARY).value] += event.change_bytes
        if event.change_bytes > 0:
            operator = event.operator
            rising = (index, trace.operators[operator].name if 0 <= operator < len(trace.operators) else "")
    if rising is not None:
        yield (*rising, {name: size for name, size in levels.items() if size})
