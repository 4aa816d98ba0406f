"""Composes two whole optimizer steps from a trace of one step with two calls of the optimizer.

The optimizer allocates its state in its first call, and gradients persist from the first micro-batch of a step; all
other events repeat. So one step is traced and, if its micro-batches are alike, only one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count, pairwise

from autotune.virtual.cost.roofline import Kind, Work
from autotune.virtual.recording.records import Category, MemoryEvent, OperatorRecord, Phase, Position, Trace, with_peaks
from autotune.virtual.steps.phases import SECOND_UPDATE, UPDATE, inside, micro_batches

Span = tuple[Position, Position]
"""A range of a trace's events and operators: begin and end."""
Size = Callable[[int], int]
"""Returns the bytes that an event allocates, given its index in the copied trace."""


def steady(trace: Trace, first: str, second: str, *, further: bool, of_step: Sequence[str] = ()) -> Trace:
    """Return the trace with an additional step and, optionally, an additional micro-batch per step.

    Args:
        first: name of the phase of the traced step, which ends after gradients are freed.
        second: name of the phase of the additional step.
        further: whether steps have a further micro-batch, which accumulates into the gradients of the first.
        of_step: names of phases that run once per step, before its micro-batches or at the start of the first one.

    Raises:
        KeyError, IndexError: a phase is missing.
    """
    step, again = trace.phase(first), trace.phase(SECOND_UPDATE)
    update, batch = trace.phase(UPDATE), micro_batches(trace, step)[0]
    positions = [(0, 0), step.begin, batch.end, update.begin, again.begin, again.end, step.end]
    before, passes, rest, update_once, update_again, ending = pairwise(positions)
    copy = Copy(trace)
    again_from = max((phase.end for name in of_step for phase in inside(trace, step, name)), default=step.begin)
    repeated = again_from, batch.end
    copy.take(before)
    for name, updated in ((first, update_once), (second, update_again)):
        begun = copy.place
        copy.take(passes)
        if further:
            # A copy of the first micro-batch, without the phases in it that run once per step.
            added = copy.place
            copy.take(repeated, further=True)
            if not _holds(repeated, batch):
                copy.add(batch.name, added)
        for span in (rest, updated, ending):
            copy.take(span)
        copy.add(name, begun)
    copy.take((step.end, (len(trace.events), len(trace.operators))))
    return with_peaks(copy.finished())


def _holds(span: Span, phase: Phase) -> bool:
    """Return whether a phase contains an operator and lies entirely within a range."""
    (first_event, first_operator), (end_event, end_operator) = span
    events = first_event <= phase.first_event <= phase.end_event <= end_event
    return events and first_operator <= phase.first_operator < phase.end_operator <= end_operator


class Copy:
    """A trace composed of ranges of another trace, each of which may be repeated.

    A storage that a range allocates gets a new number at each repetition. It replaces that of the previous repetition,
    which is freed unless it leaks (:attr:`Trace.kept`).
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
    def place(self) -> Position:
        """The position of the next event and operator."""
        return len(self._events), len(self._operators)

    def add(self, name: str, begun: Position) -> None:
        """Add a phase from a position up to the current one."""
        self._phases.append(Phase(name, begun[0], len(self._events), begun[1], len(self._operators)))

    def replace_freed(self, successors: Mapping[int, int]) -> None:
        """Make the next range free storages of its previous repetition instead of storages from before the range.

        Args:
            successors: by storage from before the range, the storage of the range that replaces it.
        """
        for storage, successor in successors.items():
            if successor in self._current:
                self._current[storage] = self._current.pop(successor)

    def take(self, span: Span, *, further: bool = False, size: Size | None = None) -> None:
        """Append a range.

        Args:
            further: whether gradients exist already; if so, those of the range are accumulated into them and freed.
            size: bytes that each event allocates; None: as in the trace.
        """
        (first, first_operator), (end, end_operator) = span
        shift = len(self._operators) - first_operator
        gradients = self._gradients(span) if further else {}
        places: list[int] = []
        given_up: dict[int, list[MemoryEvent]] = {}
        for index in range(first, end):
            self._give_up(given_up.pop(index, []))
            places.append(len(self._events))
            event = self._trace.events[index]
            if size is not None and event.change_bytes > 0:
                event = event._replace(change_bytes=size(index))
            if event.operator >= 0 and shift:
                event = MemoryEvent(event.change_bytes, event.place, event.storage, event.operator + shift)
            if not event.change_bytes:
                self._events.append(event)
            elif event.storage in gradients:
                final_at = self._trace.gradient_final_at.get(event.storage, end)
                taken = self._add(_of_storage(event, self._renamed(event.storage)), Category.GRADIENT)
                given_up.setdefault(max(final_at, index + 1), []).append(taken)
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
        self._operators += self._trace.operators[first_operator:end_operator]
        last = len(self._operators)
        works = (Work(Kind.ELEMENTWISE, bytes_read=2 * held, bytes_written=held) for held in gradients.values())
        self._operators += (OperatorRecord("aten.add_.Tensor", (), (), work, in_backward=True) for work in works)
        # Phases without operators are copied with the last range only.
        is_last = span[1] == (len(self._trace.events), len(self._trace.operators))
        for phase in self._trace.phases:
            if _holds(span, phase) or (is_last and phase.begin >= span[0]):
                first_event, end_event = places[phase.first_event - first], places[phase.end_event - first]
                ended = phase.end_operator + shift
                ended = len(self._operators) if ended == last else ended
                self._phases.append(Phase(phase.name, first_event, end_event, phase.first_operator + shift, ended))

    def finished(self) -> Trace:
        """Return the composed trace, without peaks."""
        return replace(
            self._trace,
            events=tuple(self._events),
            operators=tuple(self._operators),
            categories=self._categories,
            phases=tuple(self._phases),
            streams=self._streams,
        )

    def _gradients(self, span: Span) -> dict[int, int]:
        """Return the bytes of the gradients that a range allocates and does not free, by storage."""
        left: dict[int, int] = {}
        for event in self._trace.events[span[0][0] : span[1][0]]:
            if self._trace.categories.get(event.storage) is Category.GRADIENT:
                left[event.storage] = left.get(event.storage, 0) + event.change_bytes
        return {number: size for number, size in left.items() if size > 0}

    def _repeat(self, event: MemoryEvent, *, is_birth: bool) -> None:
        before = self._current.get(event.storage)
        if is_birth:
            is_new = before is None and event.storage not in self._held
            number = event.storage if is_new else self._renamed(event.storage)
            self._current[event.storage] = number
            self._add(_of_storage(event, number), self._trace.categories.get(event.storage))
            if before is not None and before in self._held and event.storage not in self._trace.kept:
                self._give_up([_of_storage(event, before)])
        elif before is not None and event.change_bytes > 0:
            self._add(_of_storage(event, before), None)
        elif before is not None and before in self._held:
            # An earlier range may have freed the storage already, and its size may differ from the trace's.
            self._add(_of_storage(event._replace(change_bytes=-self._held[before]), before), None)

    def _renamed(self, storage: int) -> int:
        """Return a new number for a repetition of a storage."""
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
