"""The ledger of a trace: the live storages, their allocations and frees in order, and their categories."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from autotune.virtual.peaks import Stretch, peaks_of
from autotune.virtual.records import Category, MemoryEvent, OperatorRecord, Peak, Phase, Place
from autotune.virtual.tensors import type_of_device


@dataclass(frozen=True, slots=True)
class _Open:
    name: str
    first_event: int
    first_operator: int
    start_bytes: int


class Ledger:
    """Records allocations and frees of tensor storages as they happen.

    A storage is freed when its last tensor is destroyed, as in PyTorch's allocators, so the order of events is that of
    a real run.

    Attributes:
        device_type: type of the traced device; tensors on any other device count as host memory.
        times: how often the time of the operators that run now is to be counted.
    """

    def __init__(self, device_type: str) -> None:
        self.events: list[MemoryEvent] = []
        self.operators: list[OperatorRecord] = []
        self.categories: dict[int, Category] = {}
        self.phases: list[Phase] = []
        self.settled: dict[int, int] = {}
        self.device_type = device_type
        self.times = 1
        self._live: dict[int, tuple[int, int, weakref.ref[torch.UntypedStorage]]] = {}
        self._next = 0
        self._device_bytes = 0

    def place(self, tensor: torch.Tensor) -> Place:
        """Return whether a tensor is on the device or the host."""
        return Place.DEVICE if type_of_device(tensor) == self.device_type else Place.HOST

    def note(self, tensor: torch.Tensor) -> None:
        """Record the storage of a tensor, unless it is recorded already or the tensor is on the meta device."""
        if type_of_device(tensor) == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        if known is not None:
            if known[1] != storage.nbytes():
                self._resize(key, known, storage.nbytes(), self.place(tensor))
            return
        number, size, place = self._next, storage.nbytes(), self.place(tensor)
        self._next += 1

        def free(_: object) -> None:
            _, freed, _ = self._live.pop(key)
            self._add(-freed, place, number, operator=-1)

        self._live[key] = (number, size, weakref.ref(storage, free))
        self._add(size, place, number)

    def scratch(self, sizes: Iterable[int], place: Place) -> None:
        """Record workspaces that a kernel allocates and frees before it returns."""
        taken = []
        for size in sizes:
            self._add(size, place, self._next)
            self.categories[self._next] = Category.TEMPORARY
            taken.append((self._next, size))
            self._next += 1
        for number, size in reversed(taken):
            self._add(-size, place, number, operator=-1)

    def number(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a live storage, which no other one of the trace has.

        Raises:
            KeyError: it was never recorded: its tensors are on the meta device.
        """
        return self._live[storage._cdata][0]

    def is_untagged(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage has no category yet."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        return known is not None and known[0] not in self.categories

    def tag(self, tensor: torch.Tensor, category: Category) -> None:
        """Set the category of a tensor's storage."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        if known is not None:
            self.categories[known[0]] = category

    def settle(self, tensor: torch.Tensor) -> None:
        """Record that a tensor's storage is final: the gradient in it will not move to another one."""
        known = self._live.get(tensor.untyped_storage()._cdata)
        if known is not None:
            self.settled.setdefault(known[0], len(self.events))

    def tag_live(self, category: Category, *, since: int = 0) -> None:
        """Set the category of every live storage that has none and whose number is at least ``since``."""
        for number, _, _ in self._live.values():
            if number >= since:
                self.categories.setdefault(number, category)

    @property
    def next_number(self) -> int:
        """The number of the next storage."""
        return self._next

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the body of the context as a phase of the trace."""
        opened = _Open(name, len(self.events), len(self.operators), self._device_bytes)
        try:
            yield
        finally:
            self._close(opened)

    def _close(self, opened: _Open) -> None:
        empty = Peak()
        self.phases.append(
            Phase(
                opened.name,
                opened.first_event,
                len(self.events),
                opened.first_operator,
                len(self.operators),
                opened.start_bytes,
                self._device_bytes,
                empty,
                empty,
            )
        )

    def peaks(self, place: Place, stretches: Iterable[Stretch]) -> list[Peak]:
        """Return the peak of live bytes at a place, for each range of events."""
        return peaks_of(self.events, self.categories, place, stretches)

    def _resize(
        self, key: int, known: tuple[int, int, weakref.ref[torch.UntypedStorage]], size: int, place: Place
    ) -> None:
        number, before, reference = known
        self._live[key] = (number, size, reference)
        self._add(size - before, place, number)

    def _add(self, change_bytes: int, place: Place, number: int, operator: int | None = None) -> None:
        if change_bytes:
            operator = len(self.operators) if operator is None else operator
            self.events.append(MemoryEvent(change_bytes, place, number, operator))
            if place is Place.DEVICE:
                self._device_bytes += change_bytes
