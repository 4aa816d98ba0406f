"""The records of a trace: memory events, operators, phases and their peaks; standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple, TypeVar

from autotune.core.jobs.traced import Peak
from autotune.virtual.cost.roofline import Work

Capability = tuple[int, int]
"""CUDA compute capability, which selects kernels."""
T = TypeVar("T")


class Capabilities:
    """The compute capability of a trace's GPU, and further ones for which the trace may be valid too.

    Attributes:
        alike: the further ones for which every decision has been the same so far.
    """

    def __init__(self, own: Capability, others: Iterable[Capability] = ()) -> None:
        self.alike = set(others)
        self._own = own

    def decide(self, rule: Callable[[Capability], T]) -> T:
        """Apply a rule to the GPU's capability; drop further capabilities for which its result differs."""
        decision = rule(self._own)
        self.alike = {other for other in self.alike if rule(other) == decision}
        return decision


class Place(StrEnum):
    """The memory that holds a storage. The target ``cpu`` has no accelerator: everything is on the device."""

    DEVICE = "device"
    HOST = "host"


class Category(StrEnum):
    """The category of a storage, in the terms of PyTorch's memory profiler.

    ``ACTIVATION``: storages without a category that are live when a backward pass begins or a recomputation ends: saved
    tensors and the batch. ``TEMPORARY``: all others. ``OUTLIER`` is not PyTorch's: copies of columns with outliers that
    8-bit products save. Their size depends on values; half of the maximum is assumed.
    """

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"
    OUTLIER = "outlier"


EMPTY_CACHE, CUBLAS_WORKSPACE = -1, -2
"""Storage numbers of events without a storage: the caching allocator releases its cache (``torch.cuda.empty_cache``);
the first matrix product of a pass, for which cuBLAS allocates a workspace."""


class MemoryEvent(NamedTuple):
    """One allocation or free.

    Attributes:
        change_bytes: requested bytes, before any allocator's rounding; negative for a free; 0 for
            :data:`EMPTY_CACHE` and :data:`CUBLAS_WORKSPACE`.
        storage: number of the storage, unique in the trace and shared by its allocation and its free.
        operator: index into :attr:`Trace.operators` of the operator that allocated it, or -1 for a free.
    """

    change_bytes: int
    place: Place
    storage: int
    operator: int = -1


@dataclass(frozen=True, slots=True)
class OperatorRecord:
    """One operator that was dispatched on the device or the host.

    Attributes:
        name: such as ``aten.mm.default``.
        shapes: shapes of its tensor inputs, then of its tensor outputs.
        dtypes: their dtypes, such as ``torch.bfloat16``.
        work: its work on the device; ``Kind.NOTHING`` for a host operator, a view or an allocation.
        place: memory of its outputs.
        in_backward: whether it ran inside the backward pass, recomputation included.
        call: the result of :func:`autotune.virtual.operators.calls.call_of`; may be empty.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    work: Work
    place: Place = Place.DEVICE
    in_backward: bool = False
    call: str = ""


Position = tuple[int, int]
"""A position in a trace: an index of an event and an index of an operator."""


@dataclass(frozen=True)
class Phase:
    """A named part of a trace, such as one optimizer step.

    Attributes:
        first_event: index of its first event.
        end_event: index after its last event.
        first_operator: index of its first operator.
        end_operator: index after its last operator.
        start_bytes: bytes on the device when it began.
        end_bytes: bytes on the device when it ended.
    """

    name: str
    first_event: int
    end_event: int
    first_operator: int
    end_operator: int
    start_bytes: int = 0
    end_bytes: int = 0
    device_peak: Peak = field(default_factory=Peak)
    host_peak: Peak = field(default_factory=Peak)

    @property
    def begin(self) -> Position:
        """The position of its first event and operator."""
        return self.first_event, self.first_operator

    @property
    def end(self) -> Position:
        """The position after its last event and operator."""
        return self.end_event, self.end_operator


@dataclass(frozen=True)
class Trace:
    """The memory events, operators and phases of a function on the virtual device, in order.

    Attributes:
        target: the simulated device, ``cpu`` or ``cuda``.
        categories: the category of each storage, by its number.
        assumptions: descriptions of the assumptions made where the function read an unknown value, with their counts.
        gradient_final_at: by storage number of a gradient, the number of events when it was final; for parameters
            passed to :func:`autotune.virtual.engine.tracing.mark_gradient_final`.
        kept: by number of a leaked storage, the number of events when its last tensor was destroyed, or None if a
            tensor is left. In a repetition of the step, the corresponding storage is freed at that event.
        alike: the further compute capabilities for which every kernel and workspace is the same.
        streams: stream ids by storage number, for storages that are not allocated on the default stream.
    """

    target: str
    events: tuple[MemoryEvent, ...]
    operators: tuple[OperatorRecord, ...]
    categories: Mapping[int, Category]
    phases: tuple[Phase, ...]
    device_peak: Peak = field(default_factory=Peak)
    host_peak: Peak = field(default_factory=Peak)
    assumptions: Mapping[str, int] = field(default_factory=dict)
    gradient_final_at: Mapping[int, int] = field(default_factory=dict)
    kept: Mapping[int, int | None] = field(default_factory=dict)
    alike: frozenset[tuple[int, int]] = frozenset()
    streams: Mapping[int, int] = field(default_factory=dict)

    def phase(self, name: str) -> Phase:
        """Return the phase of that name; the last one where there are several.

        Raises:
            KeyError: there is none.
        """
        for phase in reversed(self.phases):
            if phase.name == name:
                return phase
        raise KeyError(name)


def with_peaks(trace: Trace) -> Trace:
    """Return the trace with its peaks, and with the start bytes, end bytes and peaks of its phases.

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


def _peaks(trace: Trace, place: Place, stretches: Iterable[tuple[int, int]]) -> list[Peak]:
    """Return the peak of live bytes at a place, for each range of events."""
    levels = _levels(trace, place)
    # For each range, the number of events after which it is at its peak.
    highest = [first + levels[first : end + 1].index(max(levels[first : end + 1])) for first, end in stretches]
    parts = dict(held_after(trace, place, sorted(set(highest))))
    return [Peak(levels[taken], parts[taken]) for taken in highest]


def held_after(trace: Trace, place: Place, counts: Iterable[int]) -> Iterator[tuple[int, dict[str, int]]]:
    """Yield each of the ascending event counts with the live bytes at a place after that many events, by category."""
    held: dict[Category, int] = {}
    counted = 0
    for taken in counts:
        for event in trace.events[counted:taken]:
            if event.place is place:
                category = trace.categories.get(event.storage, Category.TEMPORARY)
                held[category] = held.get(category, 0) + event.change_bytes
        counted = taken
        yield taken, {category.value: size for category, size in held.items() if size}
