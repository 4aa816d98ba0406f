"""Composes two whole optimizer steps from a trace of one with a single micro-batch and two calls of the optimizer.

The optimizer allocates its state in its first call, and gradients persist from the first micro-batch of a step on; all
other events repeat. The forward and backward passes therefore need to be traced only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise

from autotune.virtual.costs import Kind, Work
from autotune.virtual.peaks import with_peaks
from autotune.virtual.phases import SECOND_UPDATE, UPDATE, inside, micro_batches
from autotune.virtual.records import Category, MemoryEvent, OperatorRecord, Phase, Trace

_Place = tuple[int, int]
"""A position in a trace: an index of an event and an index of an operator."""


def steady(trace: Trace, first: str, second: str, *, further: bool, of_step: Sequence[str] = ()) -> Trace:
    """Return a trace with one more step than was traced and, if asked for, a further micro-batch in every step.

    Args:
        first: name of the phase of the traced step, which ends after gradients are freed.
        second: name of the phase that is added after it.
        further: whether steps have a further micro-batch, which accumulates into the gradients of the first.
        of_step: names of phases that run once per step, before its micro-batches or at the start of the first one.

    Raises:
        KeyError, IndexError: a phase is missing.
    """
    step, again = trace.phase(first), trace.phase(SECOND_UPDATE)
    update, batch = inside(trace, step, UPDATE)[0], micro_batches(trace, step)[0]
    before, passes, rest, update_once, update_again, ending = _spans(
        [(0, 0), _start(step), _end(batch), _start(update), _start(again), _end(again), _end(step)]
    )
    copy = _Copy(trace)
    again_from = max((_end(phase) for name in of_step for phase in inside(trace, step, name)), default=_start(step))
    repeated = _Span(*again_from, *_end(batch))
    copy.take(before)
    for name, updated in ((first, update_once), (second, update_again)):
        begun = copy.place
        copy.take(passes)
        if further:
            # A copy of the first micro-batch, without the phases in it that run once per step.
            added = copy.place
            copy.take(repeated, further=True)
            if not repeated.holds(batch):
                copy.add(batch.name, added)
        for span in (rest, updated, ending):
            copy.take(span)
        copy.add(name, begun)
    copy.take(_Span(*_end(step), len(trace.events), len(trace.operators)))
    return copy.finished()


@dataclass(frozen=True)
class _Span:
    """A range of a trace's events and operators."""

    first_event: int
    first_operator: int
    end_event: int
    end_operator: int

    def holds(self, phase: Phase) -> bool:
        """Whether a phase lies entirely within the range."""
        events = self.first_event <= phase.first_event <= phase.end_event <= self.end_event
        return events and self.first_operator <= phase.first_operator < phase.end_operator <= self.end_operator


def _spans(places: Iterable[_Place]) -> Iterator[_Span]:
    return (_Span(*start, *end) for start, end in pairwise(places))


def _start(phase: Phase) -> _Place:
    return phase.first_event, phase.first_operator


def _end(phase: Phase) -> _Place:
    return phase.end_event, phase.end_operator


class _Copy:
    """A trace composed of ranges of another trace, each of which may be repeated.

    A storage allocated in a range gets a new number at each repetition, and replaces the one of the repetition before,
    unless that one is kept.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._events: list[MemoryEvent] = []
        self._operators: list[OperatorRecord] = []
        self._phases: list[Phase] = []
        self._born: dict[int, int] = {}
        for index, event in enumerate(trace.events):
            self._born.setdefault(event.storage, index)
        self._numbers = count(max(self._born, default=0) + 1)
        # New numbers of the original trace's storages, then bytes and categories by new number.
        self._current: dict[int, int] = {}
        self._streams = dict(trace.streams)
        self._held: dict[int, int] = {}
        self._categories: dict[int, Category] = {}

    @property
    def place(self) -> _Place:
        """The position of the next event and operator."""
        return len(self._events), len(self._operators)

    def add(self, name: str, begun: _Place) -> None:
        """Add a phase from a position up to the current one."""
        self._phases.append(Phase(name, begun[0], len(self._events), begun[1], len(self._operators)))

    def take(self, span: _Span, *, further: bool = False) -> None:
        """Append a range.

        Args:
            further: whether gradients exist already: those of the range are accumulated into them and freed at once.
        """
        shift = len(self._operators) - span.first_operator
        gradients = self._gradients(span) if further else {}
        places: list[int] = []
        given_up: dict[int, list[MemoryEvent]] = {}
        for index in range(span.first_event, span.end_event):
            self._give_up(given_up.pop(index, []))
            places.append(len(self._events))
            event = self._trace.events[index]
            if event.operator >= 0 and shift:
                event = MemoryEvent(event.change_bytes, event.place, event.storage, event.operator + shift)
            if not event.change_bytes:
                self._events.append(event)
            elif event.storage in gradients:
                settled = self._trace.settled.get(event.storage, span.end_event)
                taken = self._add(_of_storage(event, self._renamed(event.storage)), Category.GRADIENT)
                given_up.setdefault(max(settled, index + 1), []).append(taken)
            else:
                is_birth = self._born[event.storage] == index
                is_repeated = event.storage in self._current
                self._repeat(event, is_birth=is_birth)
                ended = self._trace.kept.get(event.storage)
                if is_birth and is_repeated and ended is not None:
                    taken = _of_storage(event, self._current[event.storage])
                    given_up.setdefault(max(ended, index + 1), []).append(taken)
        for left in given_up.values():
            self._give_up(left)
        places.append(len(self._events))
        self._operators += self._trace.operators[span.first_operator : span.end_operator]
        end = len(self._operators)
        works = (Work(Kind.ELEMENTWISE, bytes_read=2 * size, bytes_written=size) for size in gradients.values())
        self._operators += (OperatorRecord("aten.add_.Tensor", (), (), work, in_backward=True) for work in works)
        for phase in filter(span.holds, self._trace.phases):
            first_event, end_event = (places[at - span.first_event] for at in (phase.first_event, phase.end_event))
            last = phase.end_operator + shift
            end_operator = len(self._operators) if last == end else last
            self._phases.append(Phase(phase.name, first_event, end_event, phase.first_operator + shift, end_operator))

    def finished(self) -> Trace:
        """Return the composed trace."""
        composed = replace(
            self._trace,
            events=tuple(self._events),
            operators=tuple(self._operators),
            categories=self._categories,
            phases=tuple(self._phases),
            streams=self._streams,
        )
        return with_peaks(composed)

    def _gradients(self, span: _Span) -> dict[int, int]:
        """Return the bytes of the gradients that a range allocates and does not free, by storage."""
        left: dict[int, int] = {}
        for event in self._trace.events[span.first_event : span.end_event]:
            if self._trace.categories.get(event.storage) is Category.GRADIENT:
                left[event.storage] = left.get(event.storage, 0) + event.change_bytes
        return {number: size for number, size in left.items() if size > 0}

    def _repeat(self, event: MemoryEvent, *, is_birth: bool) -> None:
        before = self._current.get(event.storage)
        if is_birth:
            number = event.storage if before is None else self._renamed(event.storage)
            self._current[event.storage] = number
            self._add(_of_storage(event, number), self._trace.categories.get(event.storage))
            if before is not None and before in self._held and event.storage not in self._trace.kept:
                self._give_up([_of_storage(event, before)])
        elif before is not None and before in self._held:
            # A range may free a storage that an earlier one has freed already.
            self._add(_of_storage(event, before), None)

    def _renamed(self, storage: int) -> int:
        """Return a new number for the same storage of a repetition."""
        number = next(self._numbers)
        if storage in self._streams:
            self._streams[number] = self._streams[storage]
        return number

    def _add(self, event: MemoryEvent, category: Category | None) -> MemoryEvent:
        self._events.append(event)
        if category is not None:
            self._categories[event.storage] = category
        held = self._held.get(event.storage, 0) + event.change_bytes
        if held:
            self._held[event.storage] = held
        else:
            self._held.pop(event.storage, None)
        return event

    def _give_up(self, taken: Iterable[MemoryEvent]) -> None:
        for event in taken:
            self._add(event._replace(change_bytes=-self._held[event.storage], operator=-1), None)


def _of_storage(event: MemoryEvent, number: int) -> MemoryEvent:
    return event if event.storage == number else MemoryEvent(event.change_bytes, event.place, number, event.operator)
