"""Extracts the memory levels over a steady optimizer step from a trace."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress
from operator import not_

from autotune.core.program import CONSTRUCTION, OPTIMIZER_STEP, StepProgram
from autotune.core.timeline import Occurrence, Part, Section
from autotune.virtual.recording.records import OperatorRecord, Phase, Place, Position, Trace, held_after
from autotune.virtual.steps.phases import MICRO_BATCH, inside, micro_batches, step_name


@dataclass(frozen=True)
class _Moment:
    """A local maximum of the device's live bytes: the event, its operator, if any, and the bytes by category."""

    event: int
    operator: OperatorRecord | None
    levels: Mapping[str, int]

    @property
    def in_backward(self) -> bool:
        """Whether it is in the backward pass."""
        return self.operator is not None and self.operator.in_backward

    @property
    def name(self) -> str:
        """The operator's name and the shape of its last output, or of its last input if it has no outputs.

        Example: ``aten.mm.default [8, 512]``.
        """
        if self.operator is None:
            return ""
        return " ".join([self.operator.name, *(str(list(shape)) for shape in self.operator.shapes[-1:])])


def sections(trace: Trace, step: Phase, program: StepProgram) -> tuple[tuple[Section, slice | None], ...]:
    """Return the sections of the setup, of an optimizer step on the largest micro-batch, and of the end, in order.

    Each has its range of :attr:`Trace.operators`; the construction has None, since its time is part of no step.

    Micro-batches of earlier steps are left out, since those of this step need at least as much memory. Events between
    two phases belong to the later one, events after the last micro-batch to the optimizer step.

    Args:
        step: the phase of the optimizer step.
        program: the names of the other phases.
    """
    later = [phase for phase in trace.phases if phase.name in program.after]
    endings = [phase for phase in later if phase.first_event >= step.end_event]
    # A training may evaluate before its first step alone.
    ended = {phase.name for phase in endings}
    earlier = [phase for phase in later if phase.end_event <= step.first_event and phase.name not in ended]
    moments = list(_moments(trace, max([step.end_event, *(phase.end_event for phase in endings)])))
    host_levels = list(accumulate(event.change_bytes if event.place is Place.HOST else 0 for event in trace.events))
    apart = {MICRO_BATCH, *program.before, *program.in_step, *program.leading, *program.after}
    before = [moment for moment in moments if moment.event < step.first_event and not _is_in(trace, apart, moment)]
    # Separately: memory of the construction by an engine grows with depth differently from that of the first step,
    # which holds all of the optimizer state.
    first = next((phase.first_event for phase in trace.phases if phase.name == step_name(0)), step.first_event)
    built = [moment.event < first for moment in before]
    start = [_highest(compress(before, built)), _highest(compress(before, map(not_, built)))]

    def section(
        part: Part, begin: Position, end: Position, levels: Sequence[_Moment] = moments
    ) -> tuple[Section, slice | None]:
        return _section(host_levels, part, levels, (begin[0], end[0])), slice(begin[1], end[1])

    construction = _section(host_levels, Part(CONSTRUCTION, Occurrence.BEFORE), start, (0, step.first_event))
    found: list[tuple[Section, slice | None]] = [(construction, None)]
    run_once = (phase for phase in trace.phases if phase.name in program.before)
    found += [section(Part(phase.name, Occurrence.BEFORE), phase.begin, phase.end) for phase in run_once]
    begin = step.begin
    for part, phase in _in_step(trace, step, program):
        # With vLLM, the generation phase allocates nothing; the bytes held meanwhile count.
        empty = not any(begin[0] <= moment.event < phase.end_event for moment in moments)
        levels = [_held(trace, begin[0])] if empty else moments
        found.append(section(part, begin, (max(phase.end_event, begin[0] + 1), phase.end_operator), levels))
        begin = phase.end
    found.append(section(Part(OPTIMIZER_STEP, Occurrence.ONCE), begin, step.end))
    for phase in (*earlier, *endings):
        # A phase may allocate nothing; the bytes held at its start count.
        levels = [_held(trace, phase.first_event), *moments]
        end = max(phase.end_event, phase.first_event + 1), phase.end_operator
        found.append(section(Part(phase.name, Occurrence.AFTER), phase.begin, end, levels))
    return tuple(found)


def _highest(moments: Iterable[_Moment]) -> _Moment:
    """Return the levels of the highest moment, as a moment without an operator."""
    highest = max(moments, key=lambda moment: sum(moment.levels.values()), default=None)
    return _Moment(0, None, highest.levels if highest else {})


def _held(trace: Trace, event: int) -> _Moment:
    """Return the device's live bytes before an event, by category, as a moment without an operator."""
    return _Moment(event, None, dict(held_after(trace, Place.DEVICE, [event]))[event])


def _in_step(trace: Trace, step: Phase, program: StepProgram) -> Iterator[tuple[Part, Phase]]:
    """Yield the parts of a step up to its second micro-batch, in order, each with its phase."""
    for name in program.in_step:
        yield from ((Part(name, Occurrence.ONCE), phase) for phase in inside(trace, step, name)[:1])
    for occurrence, phase in zip((Occurrence.FIRST, Occurrence.FURTHER), micro_batches(trace, step), strict=False):
        for name in program.leading:
            yield from ((Part(name, occurrence), found) for found in inside(trace, phase, name))
        yield Part(MICRO_BATCH, occurrence), phase


def _is_in(trace: Trace, names: Collection[str], moment: _Moment) -> bool:
    return any(phase.name in names and phase.first_event <= moment.event < phase.end_event for phase in trace.phases)


def _section(host_levels: Sequence[int], part: Part, moments: Sequence[_Moment], events: tuple[int, int]) -> Section:
    first, end = events
    chosen = [moment for moment in moments if first <= moment.event < end]
    names = sorted({name for moment in chosen for name in moment.levels})
    levels = {name: tuple([moment.levels.get(name, 0) for moment in chosen]) for name in names}
    backward = next((index for index, moment in enumerate(chosen) if moment.in_backward), len(chosen))
    moments_named = tuple([moment.name for moment in chosen])
    return Section(part, moments_named, levels, max([0, *host_levels[first:end]]), backward=backward)


def _moments(trace: Trace, end: int) -> Iterator[_Moment]:
    """Yield the local maxima of the device's live bytes, including one at the end of the range."""
    numbered = enumerate(trace.events[:end])
    changes = [index for index, event in numbered if event.place is Place.DEVICE and event.change_bytes]
    grows = [trace.events[index].change_bytes > 0 for index in changes]
    turns = zip(changes, grows, [*grows[1:], False], strict=False)
    highest = [index for index, now, later in turns if now and not later]
    for count, levels in held_after(trace, Place.DEVICE, (index + 1 for index in highest)):
        operator = trace.events[count - 1].operator
        known = 0 <= operator < len(trace.operators)
        yield _Moment(count - 1, trace.operators[operator] if known else None, levels)
