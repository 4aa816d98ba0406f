"""From a trace to the course of memory through its steady optimizer step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from autotune.core.step_time import StepTime
from autotune.core.timeline import Part, Section
from autotune.virtual.costs import Work
from autotune.virtual.phases import MICRO_BATCH, micro_batches
from autotune.virtual.records import Category, OperatorRecord, Phase, Place, Trace

Timing = Callable[[Iterable[Work]], StepTime]


@dataclass(frozen=True)
class _Moment:
    """When the device's bytes have risen for the time being: the event, the operator that it was, and the levels.

    Attributes:
        sized: the operator with the shape of the last tensor that it gave, or was given.
    """

    event: int
    operator: str
    sized: str
    in_backward: bool
    levels: Mapping[str, int]


def sections(trace: Trace, step: Phase, timing: Timing | None = None) -> tuple[Section, ...]:
    """Return what happens before an optimizer step at its worst, and then in each part of it.

    Micro-batches of earlier steps are left out: those of the step need no less.

    Args:
        step: the phase of the optimizer step.
        timing: says how long operators take on the device that is planned for; None: no times.
    """
    inside = micro_batches(trace, step)
    moments = list(_moments(trace, step.end_event))
    before = max(
        (moment for moment in moments if moment.event < step.first_event and not _is_in(trace, MICRO_BATCH, moment)),
        key=lambda moment: sum(moment.levels.values()),
        default=None,
    )
    start = [_Moment(0, "", "", False, before.levels if before else {})]
    found = [_section(trace, Part.BEFORE, start, (0, step.first_event), None)]
    event, operator = step.first_event, step.first_operator
    for part, phase in zip((Part.FIRST_MICRO_BATCH, Part.FURTHER_MICRO_BATCH), inside, strict=False):
        time = timing(_works(trace, operator, phase.end_operator)) if timing else None
        found.append(_section(trace, part, moments, (event, phase.end_event), time))
        event, operator = phase.end_event, phase.end_operator
    time = timing(_works(trace, operator, step.end_operator)) if timing else None
    return (*found, _section(trace, Part.OPTIMIZER, moments, (event, step.end_event), time))


def _is_in(trace: Trace, name: str, moment: _Moment) -> bool:
    return any(phase.name == name and phase.first_event <= moment.event < phase.end_event for phase in trace.phases)


def _works(trace: Trace, first: int, end: int) -> Iterable[Work]:
    return (operator.work for operator in trace.operators[first:end])


def _section(
    trace: Trace, part: Part, moments: list[_Moment], events: tuple[int, int], time: StepTime | None
) -> Section:
    first, end = events
    chosen = [moment for moment in moments if first <= moment.event < end]
    names = sorted({name for moment in chosen for name in moment.levels})
    levels = {name: tuple(moment.levels.get(name, 0) for moment in chosen) for name in names}
    backward = next((index for index, moment in enumerate(chosen) if moment.in_backward), len(chosen))
    host = host_peak = 0
    for index, event in enumerate(trace.events[:end]):
        if event.place is Place.HOST:
            host += event.change_bytes
        if index >= first:
            host_peak = max(host_peak, host)
    # An optimizer that goes from parameter to parameter does the same to each: only sizes tell one from another.
    moments_named = (moment.sized if part is Part.OPTIMIZER else moment.operator for moment in chosen)
    return Section(part, tuple(moments_named), levels, host_peak, time, backward)


def _moments(trace: Trace, end: int) -> Iterator[_Moment]:
    """Yield index, operator and levels of every event after which the device's bytes go down, or that is the last."""
    levels: dict[str, int] = defaultdict(int)
    rising: tuple[int, OperatorRecord | None] | None = None

    def moment(event: int, operator: OperatorRecord | None) -> _Moment:
        held = {name: size for name, size in levels.items() if size}
        if operator is None:
            return _Moment(event, "", "", False, held)
        return _Moment(event, operator.name, f"{operator.name} {operator.shapes[-1:]}", operator.in_backward, held)

    for index, event in enumerate(trace.events[:end]):
        if event.place is not Place.DEVICE:
            continue
        if event.change_bytes < 0 and rising is not None:
            yield moment(*rising)
            rising = None
        levels[trace.categories.get(event.storage, Category.TEMPORARY).value] += event.change_bytes
        if event.change_bytes > 0:
            known = 0 <= event.operator < len(trace.operators)
            rising = (index, trace.operators[event.operator] if known else None)
    if rising is not None:
        yield moment(*rising)
