"""Models an LRU cache of a device: the order in which its memory blocks were last accessed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

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
