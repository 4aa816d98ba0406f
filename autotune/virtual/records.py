"""What a trace recorded: memory events, operators, phases and peaks; standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from autotune.virtual.costs import Work


class Place(StrEnum):
    """Where bytes lie. On the target ``cpu`` there is no accelerator and everything lies on the device."""

    DEVICE = "device"
    HOST = "host"


class Category(StrEnum):
    """What bytes are for; PyTorch's own words.

    ``ACTIVATION`` is what the forward pass (or its recomputation) leaves for the backward pass, ``TEMPORARY`` what no
    later part of the step needs, ``OTHER`` what outlives a phase without being any of the rest, such as the batch.
    """

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"
    OTHER = "other"


class MemoryEvent(NamedTuple):
    """One allocation or free.

    Attributes:
        change_bytes: bytes as asked for, before any allocator's rounding; negative for a free.
        storage: number of the storage, unique in the trace; its allocation and its free have the same.
        operator: index into :attr:`Trace.operators` of the operator that allocated it, or -1 for a free.
    """

    change_bytes: int
    place: Place
    storage: int
    operator: int = -1


@dataclass(frozen=True, slots=True)
class OperatorRecord:
    """One operator that ran on the device or the host.

    Attributes:
        name: such as ``aten.mm.default``.
        shapes: sizes of its tensor inputs, then of its tensor outputs.
        dtypes: their types, such as ``torch.bfloat16``.
        work: what it does on the device; nothing for an operator of the host, a view or an allocation.
        place: where its outputs lie.
        in_backward: whether it ran inside the backward pass, recomputation included.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    work: Work
    place: Place = Place.DEVICE
    in_backward: bool = False


@dataclass(frozen=True)
class Peak:
    """The most bytes that were live at once.

    Attributes:
        bytes: sum over all live storages.
        event: index into :attr:`Trace.events` of the event that reached it, or -1 when nothing was allocated.
        categories: its parts; they sum to :attr:`bytes`.
    """

    bytes: int = 0
    event: int = -1
    categories: Mapping[Category, int] = field(default_factory=dict)


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
    start_bytes: int
    end_bytes: int
    device_peak: Peak
    host_peak: Peak


@dataclass(frozen=True)
class Trace:
    """Everything that a function did to memory on the virtual device, in order.

    Attributes:
        target: the device that was stood in for, ``cpu`` or ``cuda``.
        categories: what each storage was for, by its number.
        assumptions: what was assumed where the function looked at a value that only real data has, with how often.
        settled: by the number of a gradient's storage, how many events there were when it was where it stays, for
            those that :func:`autotune.virtual.tracing.settled` was told of.
    """

    target: str
    events: tuple[MemoryEvent, ...]
    operators: tuple[OperatorRecord, ...]
    categories: Mapping[int, Category]
    phases: tuple[Phase, ...]
    device_peak: Peak
    host_peak: Peak
    assumptions: Mapping[str, int]
    settled: Mapping[int, int] = field(default_factory=dict)

    def phase(self, name: str) -> Phase:
        """Return the phase of that name; the last one where there are several.

        Raises:
            KeyError: there is none.
        """
        for phase in reversed(self.phases):
            if phase.name == name:
                return phase
        raise KeyError(name)
