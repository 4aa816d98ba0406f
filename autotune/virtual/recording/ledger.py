"""The ledger of a trace: the live storages, their allocations and frees in order, and their categories."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from autotune.core.rows.batch_geometry import Recompiled
from autotune.virtual.cost.roofline import Kind
from autotune.virtual.recording.records import (
    CUBLAS_WORKSPACE,
    EMPTY_CACHE,
    Category,
    MemoryEvent,
    OperatorRecord,
    Phase,
    Place,
)
from autotune.virtual.recording.streams import current_stream
from autotune.virtual.recording.tensors import storage_of, type_of_device

# Every tensor has fewer than 2**48 elements.
_ADDRESS_BITS = 48
# Bounds of the tracked history: more bytes than any L2 cache of the catalogue holds, and enough blocks for times.
_MAX_BYTES, _MAX_BLOCKS = 2**27, 256


class Recency:
    """The memory blocks in LRU order.

    A new storage reuses the block of its size that was freed last, if there is one, like PyTorch's allocator.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[int, int]] = {}
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self._bytes = 0
        self._freed: dict[int, list[int]] = {}

    def allocate(self, storage: int, size: int) -> None:
        """Record that a storage of ``size`` bytes is allocated on the device."""
        freed = self._freed.get(size, [])
        while freed and freed[-1] not in self._sizes:
            freed.pop()
        self._blocks[storage] = freed.pop() if freed else storage, size

    def free(self, storage: int) -> None:
        """Record that a storage is freed."""
        block, size = self._blocks.pop(storage, (storage, 0))
        if block in self._sizes:
            self._freed.setdefault(size, []).append(block)

    def touch(self, storages: Iterable[int]) -> None:
        """Record that storages are read or written; storages that are not on the device are ignored."""
        for storage in storages:
            if (entry := self._blocks.get(storage)) is not None:
                block, size = entry
                self._bytes += size - self._sizes.pop(block, 0)
                self._sizes[block] = size
        while self._bytes > _MAX_BYTES or len(self._sizes) > _MAX_BLOCKS:
            self._bytes -= self._sizes.popitem(last=False)[1]

    def since(self, storages: Sequence[int]) -> tuple[int | None, ...]:
        """Return for each storage the bytes of other blocks accessed since its last access, or None if untracked."""
        blocks = [self._blocks.get(storage, (storage, 0))[0] for storage in storages]
        remaining = {block for block in blocks if block in self._sizes}
        distances: dict[int, int] = {}
        total = 0
        for block, size in reversed(self._sizes.items()):
            if not remaining:
                break
            if block in remaining:
                remaining.remove(block)
                distances[block] = total
            total += size
        return tuple(map(distances.get, blocks))


class _Live(NamedTuple):
    number: int
    size: int
    place: Place
    reference: weakref.ref[torch.UntypedStorage]
    pinned: bool


class Ledger:
    """Records allocations and frees of tensor storages as they happen.

    A storage is freed when its last tensor is destroyed, as in PyTorch's allocators, so events occur in the order of a
    real run.

    Attributes:
        device_type: type of the traced device; tensors on any other device count as host memory.
        times: the number of executions that each operator recorded now stands for.
        generates: whether completions are being generated.
        keeps_gradients: whether parameters keep their gradients; False if an engine moves them to its own buffers.
        again: micro-batches that are not traced and that cause recompilations.
        streams: stream ids by storage number, for storages that are not allocated on the default stream.
        next_number: the number of the next storage.
        recency: the storages on the device that were accessed last.
    """

    def __init__(self, device_type: str) -> None:
        self.events: list[MemoryEvent] = []
        self.operators: list[OperatorRecord] = []
        self.categories: dict[int, Category] = {}
        self.phases: list[Phase] = []
        self.gradient_final_at: dict[int, int] = {}
        self.kept: dict[int, int | None] = {}
        self.device_type = device_type
        self.times = 1
        self.again = Recompiled()
        self.generates = False
        self.keeps_gradients = True
        self.streams: dict[int, int] = {}
        self._multiplied: set[bool] = set()
        self._live: dict[int, _Live] = {}
        self.recency = Recency()
        self.next_number = 0

    def place(self, tensor: torch.Tensor) -> Place:
        """Return whether a tensor is on the device or the host."""
        return Place.DEVICE if type_of_device(tensor) == self.device_type else Place.HOST

    def note(self, tensor: torch.Tensor, *, pinned: bool = False) -> None:
        """Record the storage of a tensor, unless it is recorded already or the tensor is on the meta device.

        Args:
            pinned: whether a host storage is in pinned memory.
        """
        if type_of_device(tensor) == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            self.resized(storage)
            return
        number, place = self.next_number, self.place(tensor)
        pinned = pinned and place is Place.HOST
        size = _held_bytes(storage, pinned=pinned)
        self.next_number += 1

        def free(_: object) -> None:
            size = self._live.pop(key).size
            self.recency.free(number)
            if number in self.kept:
                self.kept[number] = len(self.events)
            else:
                self._add(-size, place, number)

        self._live[key] = _Live(number, size, place, weakref.ref(storage, free), pinned)
        if place is Place.DEVICE:
            self.recency.allocate(number, size)
        if stream := current_stream().stream_id:
            self.streams[number] = stream
        self._add(size, place, number)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record a change of a storage's size; 0 bytes free it."""
        known = self._live.get(storage._cdata)
        size = 0 if known is None else _held_bytes(storage, pinned=known.pinned)
        if known is not None and size != known.size:
            self._live[storage._cdata] = known._replace(size=size)
            if known.place is Place.DEVICE:
                self.recency.free(known.number)
                self.recency.allocate(known.number, size)
            self._add(size - known.size, known.place, known.number)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage is in pinned memory of the host."""
        known = self._live.get(storage_of(tensor)._cdata)
        return known is not None and known.pinned

    def scratch(self, sizes: Iterable[int], place: Place) -> None:
        """Record workspaces that a kernel allocates and frees before it returns."""
        taken = []
        for size in sizes:
            self._add(size, place, self.next_number)
            self.categories[self.next_number] = Category.TEMPORARY
            taken.append((self.next_number, size))
            self.next_number += 1
        for number, size in reversed(taken):
            self._add(-size, place, number)

    def empty_cache(self) -> None:
        """Record that the caching allocator releases its cached blocks to the device."""
        self.events.append(MemoryEvent(0, Place.DEVICE, EMPTY_CACHE))

    def multiplied(self, *, in_backward: bool) -> None:
        """Record a matrix product on the device, after its result was allocated."""
        if in_backward not in self._multiplied:
            self._multiplied.add(in_backward)
            self.events.append(MemoryEvent(0, Place.DEVICE, CUBLAS_WORKSPACE, len(self.operators)))

    def address(self, storage: torch.UntypedStorage) -> int:
        """Return an address for a storage; it is never reused, and address ranges of storages do not overlap.

        A storage that is not live, such as that of a meta tensor, has address 0.
        """
        known = self._live.get(storage._cdata)
        return 0 if known is None else (known.number + 1) << _ADDRESS_BITS

    def numbers(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """Return the number of each tensor's storage, or -1 for one that was never recorded."""
        live = (self._live.get(tensor.untyped_storage()._cdata) for tensor in tensors)
        return [-1 if known is None else known.number for known in live]

    def ran(self, record: OperatorRecord, storages: Iterable[int], kernels: int = 1) -> None:
        """Record an operator, once per kernel, and its accesses to storages, given by number."""
        self.operators.extend([record] * kernels)
        if record.work.kind is not Kind.NOTHING:
            self.recency.touch(storages)

    def is_untagged(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage has no category yet."""
        known = self._live.get(storage_of(tensor)._cdata)
        return known is not None and known.number not in self.categories

    def tag(self, tensor: torch.Tensor, category: Category) -> None:
        """Set the category of a tensor's storage."""
        known = self._live.get(storage_of(tensor)._cdata)
        if known is not None:
            self.categories[known.number] = category

    def mark_gradient_final(self, tensor: torch.Tensor) -> None:
        """Record that the gradient in a tensor's storage is final."""
        known = self._live.get(storage_of(tensor)._cdata)
        if known is not None:
            self.gradient_final_at.setdefault(known.number, len(self.events))

    def keep(self, tensor: torch.Tensor) -> None:
        """Record that a tensor's storage stays allocated after its last tensor is destroyed."""
        self.kept.setdefault(self._live[storage_of(tensor)._cdata].number, None)

    def record_leaked_copy(self, tensor: torch.Tensor, share: float) -> None:
        """Record a leaked storage of ``share`` times the size of a tensor's storage."""
        self._add(round(share * storage_of(tensor).nbytes()), self.place(tensor), self.next_number)
        self.kept[self.next_number] = len(self.events)
        self.next_number += 1

    def tag_live(self, category: Category, *, since: int = 0) -> None:
        """Set the category of every live storage that has none and whose number is at least ``since``."""
        for known in self._live.values():
            if known.number >= since:
                self.categories.setdefault(known.number, category)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the body of the context as a phase of the trace."""
        first_event, first_operator = len(self.events), len(self.operators)
        try:
            yield
        finally:
            self.phases.append(Phase(name, first_event, len(self.events), first_operator, len(self.operators)))

    def _add(self, change_bytes: int, place: Place, number: int) -> None:
        if change_bytes:
            operator = len(self.operators) if change_bytes > 0 else -1
            self.events.append(MemoryEvent(change_bytes, place, number, operator))


def _held_bytes(storage: torch.UntypedStorage, *, pinned: bool) -> int:
    """Return the bytes that a storage takes.

    Blocks of pinned memory are powers of two (aten/src/ATen/core/CachingHostAllocator.h, ``allocate``), unless
    ``pinned_max_round_threshold_mb`` in the allocator's variable is set.
    """
    size = int(storage.nbytes())
    return 1 << (size - 1).bit_length() if pinned and size else size
